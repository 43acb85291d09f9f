import type { DynamicModule, FactoryProvider, ModuleMetadata } from '@nestjs/common';
import { LockService } from 'holdfast';
import type { ConnectOptions, Duration, Lock, OncePerOptions, PermitUsingOptions, Target } from 'holdfast';
import 'reflect-metadata';
/** The options of `HoldfastModule.forRoot`: those of `LockService.connect`, and how the service is closed. */
export interface HoldfastModuleOptions extends ConnectOptions {
    /**
     * The URL of the store, or a list of three or more `redis://` URLs. If it is present but `undefined`, the start of the application fails:
     * probably a setting is missing. Default: `HOLDFAST_URL` in the environment.
     */
    url?: Target | readonly Target[];
    /** How long jobs may go on after the end of the application has begun, in milliseconds or as text. Default: `'10s'` */
    drainMs?: Duration | undefined;
}
/** The options of `HoldfastModule.forRootAsync`. */
export interface HoldfastModuleAsyncOptions extends Pick<ModuleMetadata, 'imports'> {
    inject?: FactoryProvider['inject'];
    useFactory: (...args: any[]) => HoldfastModuleOptions | Promise<HoldfastModuleOptions>;
}
/** The options of `@Locked`. */
export interface LockedOptions extends PermitUsingOptions {
    /**
     * What a call does when the name is still busy after `waitMs`: `throw` rejects with `LOCK_TIMEOUT`; `skip` resolves to `undefined`
     * without a call of the method. Default: `throw`, which waits for `waitMs` (10 s); with `skip`, `waitMs` is 0.
     */
    ifBusy?: 'throw' | 'skip' | undefined;
    /** The largest number of permits of the name that are in use: the method runs with a permit of this semaphore instead of a lock. For one name. */
    limit?: number | undefined;
    /** With `limit`: the number of permits of each call. Default: 1 */
    permits?: number | undefined;
    /** As for `using`; `run` is only for `limit`, and not with `ifBusy: 'skip'`. Default: `fail` */
    onStoreError?: 'fail' | 'wait' | 'run' | undefined;
    /** The method runs as a reader or as a writer of the read/write lock of the name, instead of under a lock. For one name. */
    mode?: 'read' | 'write' | undefined;
}
/** The result of `HoldfastHealthIndicator.isHealthy`, as `@nestjs/terminus` expects it. */
export type HoldfastHealth = Record<string, {
    status: 'up';
    pingMs: number;
} | {
    status: 'down';
    message: string;
}>;
/** Injects the `LockService`, as its type alone does. */
export declare const InjectLocks: () => PropertyDecorator & ParameterDecorator;
/**
 * Returns the lock of the `@Locked` or `@OncePer` method that runs: for its `signal` and `fencingToken`.
 * @throws `Error` outside of such a method
 */
export declare function currentLock(): Lock;
/**
 * Runs a method under a lock, as `locks.using` does; with `limit` with a permit of a semaphore, with `mode` on a side of a read/write lock.
 * @param name the lock's name, or a function that returns it (or several) for the arguments of a call
 *
 * @example
 * @Locked((order: Order) => `order:${order.id}`, { waitMs: '5s' })
 * async pay(order: Order) { … }
 *
 * @Locked('models', { limit: 5, waitMs: '1m' })
 * async ask(question: string) { … }
 */
export declare function Locked<A extends any[]>(name: string | readonly string[] | ((...args: A) => string | readonly string[]), options?: LockedOptions): AsyncMethodDecorator;
/**
 * Runs a method once per period in all instances, as `locks.oncePer` does: for `@Cron` and `@Interval`. A call that another instance has made
 * already resolves to `undefined`.
 */
export declare function OncePer<A extends any[]>(name: string | ((...args: A) => string), options: OncePerOptions): AsyncMethodDecorator;
/** A decorator of a method that returns a promise: the lock is released when it has settled. */
export type AsyncMethodDecorator = <T extends (...args: any[]) => Promise<any>>(target: object, key: string | symbol, descriptor: TypedPropertyDescriptor<T>) => void;
/** A health indicator for `@nestjs/terminus`: `() => holdfast.isHealthy()` in `health.check([…])`. */
export declare class HoldfastHealthIndicator {
    private readonly locks;
    constructor(locks: LockService);
    /**
     * Makes one round trip to the store.
     * @param key the key of the result. Default: `locks`
     */
    isHealthy(key?: string): Promise<HoldfastHealth>;
}
/**
 * Connects a `LockService` for the whole application, and drains it at shutdown.
 *
 * @example
 * @Module({ imports: [HoldfastModule.forRoot({ url: 'redis://127.0.0.1:6379' })] })
 * class AppModule {}
 */
export declare class HoldfastModule {
    /** Connects with these options. */
    static forRoot(options?: HoldfastModuleOptions): DynamicModule;
    /** Connects with the options that `useFactory` returns, from other providers. */
    static forRootAsync({ imports, inject, useFactory }: HoldfastModuleAsyncOptions): DynamicModule;
}
