import { AsyncLocalStorage } from 'node:async_hooks'
import { Inject, Injectable, Module } from '@nestjs/common'
import type { DynamicModule, FactoryProvider, ModuleMetadata, OnApplicationShutdown, Provider } from '@nestjs/common'
import { LockService } from 'holdfast'
import type {
  ConnectOptions,
  Duration,
  Lock,
  LockError,
  OncePerOptions,
  PermitOptions,
  PermitUsingOptions,
  Semaphore,
  Target,
} from 'holdfast'
import 'reflect-metadata'

/** The options of `HoldfastModule.forRoot`: those of `LockService.connect`, and how the service is closed. */
export interface HoldfastModuleOptions extends ConnectOptions {
  /**
   * The URL of the store, or a list of three or more `redis://` URLs. If it is present but `undefined`, the start of the application fails:
   * probably a setting is missing. Default: `HOLDFAST_URL` in the environment.
   */
  url?: Target | readonly Target[]
  /** How long jobs may go on after the end of the application has begun, in milliseconds or as text. Default: `'10s'` */
  drainMs?: Duration | undefined
}

/** The options of `HoldfastModule.forRootAsync`. */
export interface HoldfastModuleAsyncOptions extends Pick<ModuleMetadata, 'imports'> {
  inject?: FactoryProvider['inject']
  useFactory: (...args: any[]) => HoldfastModuleOptions | Promise<HoldfastModuleOptions>
}

/** The options of `@Locked`. */
export interface LockedOptions extends PermitUsingOptions {
  /**
   * What a call does when the name is still busy after `waitMs`: `throw` rejects with `LOCK_TIMEOUT`; `skip` resolves to `undefined`
   * without a call of the method. Default: `throw`, which waits for `waitMs` (10 s); with `skip`, `waitMs` is 0.
   */
  ifBusy?: 'throw' | 'skip' | undefined
  /** The largest number of permits of the name that are in use: the method runs with a permit of this semaphore instead of a lock. For one name. */
  limit?: number | undefined
  /** With `limit`: the number of permits of each call. Default: 1 */
  permits?: number | undefined
  /** As for `using`; `run` is only for `limit`, and not with `ifBusy: 'skip'`. Default: `fail` */
  onStoreError?: 'fail' | 'wait' | 'run' | undefined
  /** The method runs as a reader or as a writer of the read/write lock of the name, instead of under a lock. For one name. */
  mode?: 'read' | 'write' | undefined
}

/** The result of `HoldfastHealthIndicator.isHealthy`, as `@nestjs/terminus` expects it. */
export type HoldfastHealth = Record<string, { status: 'up'; pingMs: number } | { status: 'down'; message: string }>

const OPTIONS = Symbol('holdfast.options')
/** The property in which a decorated class finds the lock service. */
const LOCKS = Symbol('holdfast.locks')
const running = new AsyncLocalStorage<Lock>()

/** Injects the `LockService`, as its type alone does. */
export const InjectLocks = (): PropertyDecorator & ParameterDecorator => Inject(LockService)

/**
 * Returns the lock of the `@Locked` or `@OncePer` method that runs: for its `signal` and `fencingToken`.
 * @throws `Error` outside of such a method
 */
export function currentLock(): Lock {
  const lock = running.getStore()
  if (!lock) throw new Error('currentLock() was called outside of a method with @Locked or @OncePer')
  return lock
}

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
export function Locked<A extends any[]>(
  name: string | readonly string[] | ((...args: A) => string | readonly string[]),
  options: LockedOptions = {},
): AsyncMethodDecorator {
  const { ifBusy = 'throw', limit, mode, ...acquire } = options
  if (ifBusy !== 'throw' && ifBusy !== 'skip')
    throw new TypeError(`@Locked: ifBusy must be 'throw' or 'skip', not ${String(ifBusy)}`)
  if (mode !== undefined && mode !== 'read' && mode !== 'write')
    throw new TypeError(`@Locked: mode must be 'read' or 'write', not ${String(mode)}`)
  if (mode !== undefined && limit !== undefined) throw new TypeError('@Locked: limit and mode exclude each other')
  if (acquire.permits !== undefined && limit === undefined) throw new TypeError('@Locked: permits needs limit')
  return wrapped('Locked', async (locks, args, job) => {
    const names = typeof name === 'function' ? name(...(args as A)) : name
    const { using, tryUsing } = callsOf(locks, names, limit, mode)
    if (ifBusy === 'throw') return using(acquire, job)
    // The service rejects an `onStoreError` that is not for this call.
    const attempt = await tryUsing(acquire as PermitOptions, job)
    return attempt.ran ? attempt.value : undefined
  })
}

/** Returns the calls of a lock, of a semaphore, or of a side of a read/write lock. */
function callsOf(
  locks: LockService,
  names: string | readonly string[],
  limit: number | undefined,
  mode: 'read' | 'write' | undefined,
): Pick<Semaphore, 'using' | 'tryUsing'> {
  if (limit === undefined && mode === undefined) {
    return {
      using: (options: any, fn?: any) => locks.using(names, options, fn),
      tryUsing: (options: any, fn?: any) => locks.tryUsing(names, options, fn),
    }
  }
  if (typeof names !== 'string')
    throw new TypeError(`@Locked: ${limit === undefined ? 'mode' : 'limit'} needs one name`)
  return limit === undefined ? locks.readWriteLock(names)[mode!] : locks.semaphore(names, limit)
}

/**
 * Runs a method once per period in all instances, as `locks.oncePer` does: for `@Cron` and `@Interval`. A call that another instance has made
 * already resolves to `undefined`.
 */
export function OncePer<A extends any[]>(
  name: string | ((...args: A) => string),
  options: OncePerOptions,
): AsyncMethodDecorator {
  return wrapped('OncePer', async (locks, args, job) => {
    const attempt = await locks.oncePer(typeof name === 'function' ? name(...(args as A)) : name, options, job)
    return attempt.ran ? attempt.value : undefined
  })
}

/** A decorator of a method that returns a promise: the lock is released when it has settled. */
export type AsyncMethodDecorator = <T extends (...args: any[]) => Promise<any>>(
  target: object,
  key: string | symbol,
  descriptor: TypedPropertyDescriptor<T>,
) => void

type Job = (lock: Lock) => unknown

/** Returns a decorator that replaces a method by `run`, with the lock service of the instance, the arguments and the method itself. */
function wrapped(
  decorator: string,
  run: (locks: LockService, args: unknown[], job: Job) => Promise<unknown>,
): AsyncMethodDecorator {
  return (target, key, descriptor: PropertyDescriptor) => {
    const method = descriptor.value
    if (typeof method !== 'function' || typeof target === 'function')
      throw new TypeError(`@${decorator} must decorate a method of an instance: ${String(key)} is something else`)
    // Nest sets the property of each instance of the class.
    Inject(LockService)(target, LOCKS)
    async function withLock(this: { [LOCKS]?: LockService }, ...args: unknown[]): Promise<unknown> {
      const locks = this?.[LOCKS]
      if (!locks) {
        const from = `${target.constructor.name}.${String(key)}`
        throw new Error(
          `${from}: no lock service was injected; Nest must create the object, with HoldfastModule imported`,
        )
      }
      return run(locks, args, (lock) => {
        const result = running.run(lock, () => method.apply(this, args))
        if (typeof result?.subscribe === 'function' || typeof result?.[Symbol.asyncIterator] === 'function')
          throw new TypeError(
            `@${decorator}: ${method.name} must return a promise; an Observable or an iterator would run without the lock`,
          )
        return result
      })
    }
    Object.defineProperty(withLock, 'name', { value: method.name })
    // Decorators below this one have described the method by metadata.
    for (const metadata of Reflect.getMetadataKeys(method)) {
      Reflect.defineMetadata(metadata, Reflect.getMetadata(metadata, method), withLock)
    }
    descriptor.value = withLock
  }
}

/** A health indicator for `@nestjs/terminus`: `() => holdfast.isHealthy()` in `health.check([…])`. */
@Injectable()
export class HoldfastHealthIndicator {
  constructor(@Inject(LockService) private readonly locks: LockService) {}

  /**
   * Makes one round trip to the store.
   * @param key the key of the result. Default: `locks`
   */
  async isHealthy(key = 'locks'): Promise<HoldfastHealth> {
    try {
      return { [key]: { status: 'up', pingMs: await this.locks.ping() } }
    } catch (thrown) {
      return { [key]: { status: 'down', message: (thrown as LockError).message } }
    }
  }
}

/** Closes the service when the application ends, after its HTTP server: `app.close()`, or a signal with `app.enableShutdownHooks()`. */
@Injectable()
class Shutdown implements OnApplicationShutdown {
  constructor(
    @Inject(LockService) private readonly locks: LockService,
    @Inject(OPTIONS) private readonly options: HoldfastModuleOptions,
  ) {}

  async onApplicationShutdown(): Promise<void> {
    try {
      await this.locks.close({ drainMs: this.options.drainMs ?? '10s' })
    } finally {
      // Also if `drainMs` is invalid.
      await this.locks.close()
    }
  }
}

const PROVIDERS: Provider[] = [
  {
    provide: LockService,
    inject: [OPTIONS],
    useFactory: ({ drainMs: _, ...options }: HoldfastModuleOptions) => LockService.connect(options),
  },
  HoldfastHealthIndicator,
  Shutdown,
]

/**
 * Connects a `LockService` for the whole application, and drains it at shutdown.
 *
 * @example
 * @Module({ imports: [HoldfastModule.forRoot({ url: 'redis://127.0.0.1:6379' })] })
 * class AppModule {}
 */
@Module({})
export class HoldfastModule {
  /** Connects with these options. */
  static forRoot(options: HoldfastModuleOptions = {}): DynamicModule {
    return moduleOf([{ provide: OPTIONS, useValue: options }])
  }

  /** Connects with the options that `useFactory` returns, from other providers. */
  static forRootAsync({ imports = [], inject = [], useFactory }: HoldfastModuleAsyncOptions): DynamicModule {
    return { ...moduleOf([{ provide: OPTIONS, inject, useFactory }]), imports }
  }
}

function moduleOf(options: Provider[]): DynamicModule {
  return {
    module: HoldfastModule,
    global: true,
    providers: [...options, ...PROVIDERS],
    exports: [LockService, HoldfastHealthIndicator],
  }
}
