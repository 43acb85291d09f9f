"use strict";
var __decorate = (this && this.__decorate) || function (decorators, target, key, desc) {
    var c = arguments.length, r = c < 3 ? target : desc === null ? desc = Object.getOwnPropertyDescriptor(target, key) : desc, d;
    if (typeof Reflect === "object" && typeof Reflect.decorate === "function") r = Reflect.decorate(decorators, target, key, desc);
    else for (var i = decorators.length - 1; i >= 0; i--) if (d = decorators[i]) r = (c < 3 ? d(r) : c > 3 ? d(target, key, r) : d(target, key)) || r;
    return c > 3 && r && Object.defineProperty(target, key, r), r;
};
var __param = (this && this.__param) || function (paramIndex, decorator) {
    return function (target, key) { decorator(target, key, paramIndex); }
};
Object.defineProperty(exports, "__esModule", { value: true });
exports.HoldfastModule = exports.HoldfastHealthIndicator = exports.InjectLocks = void 0;
exports.currentLock = currentLock;
exports.Locked = Locked;
exports.OncePer = OncePer;
const node_async_hooks_1 = require("node:async_hooks");
const common_1 = require("@nestjs/common");
const holdfast_1 = require("holdfast");
require("reflect-metadata");
const OPTIONS = Symbol('holdfast.options');
/** The property in which a decorated class finds the lock service. */
const LOCKS = Symbol('holdfast.locks');
const running = new node_async_hooks_1.AsyncLocalStorage();
/** Injects the `LockService`, as its type alone does. */
const InjectLocks = () => (0, common_1.Inject)(holdfast_1.LockService);
exports.InjectLocks = InjectLocks;
/**
 * Returns the lock of the `@Locked` or `@OncePer` method that runs: for its `signal` and `fencingToken`.
 * @throws `Error` outside of such a method
 */
function currentLock() {
    const lock = running.getStore();
    if (!lock)
        throw new Error('currentLock() was called outside of a method with @Locked or @OncePer');
    return lock;
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
function Locked(name, options = {}) {
    const { ifBusy = 'throw', limit, mode, ...acquire } = options;
    if (ifBusy !== 'throw' && ifBusy !== 'skip')
        throw new TypeError(`@Locked: ifBusy must be 'throw' or 'skip', not ${String(ifBusy)}`);
    if (mode !== undefined && mode !== 'read' && mode !== 'write')
        throw new TypeError(`@Locked: mode must be 'read' or 'write', not ${String(mode)}`);
    if (mode !== undefined && limit !== undefined)
        throw new TypeError('@Locked: limit and mode exclude each other');
    if (acquire.permits !== undefined && limit === undefined)
        throw new TypeError('@Locked: permits needs limit');
    return wrapped('Locked', async (locks, args, job) => {
        const names = typeof name === 'function' ? name(...args) : name;
        const { using, tryUsing } = callsOf(locks, names, limit, mode);
        if (ifBusy === 'throw')
            return using(acquire, job);
        // The service rejects an `onStoreError` that is not for this call.
        const attempt = await tryUsing(acquire, job);
        return attempt.ran ? attempt.value : undefined;
    });
}
/** Returns the calls of a lock, of a semaphore, or of a side of a read/write lock. */
function callsOf(locks, names, limit, mode) {
    if (limit === undefined && mode === undefined) {
        return {
            using: (options, fn) => locks.using(names, options, fn),
            tryUsing: (options, fn) => locks.tryUsing(names, options, fn),
        };
    }
    if (typeof names !== 'string')
        throw new TypeError(`@Locked: ${limit === undefined ? 'mode' : 'limit'} needs one name`);
    return limit === undefined ? locks.readWriteLock(names)[mode] : locks.semaphore(names, limit);
}
/**
 * Runs a method once per period in all instances, as `locks.oncePer` does: for `@Cron` and `@Interval`. A call that another instance has made
 * already resolves to `undefined`.
 */
function OncePer(name, options) {
    return wrapped('OncePer', async (locks, args, job) => {
        const attempt = await locks.oncePer(typeof name === 'function' ? name(...args) : name, options, job);
        return attempt.ran ? attempt.value : undefined;
    });
}
/** Returns a decorator that replaces a method by `run`, with the lock service of the instance, the arguments and the method itself. */
function wrapped(decorator, run) {
    return (target, key, descriptor) => {
        const method = descriptor.value;
        if (typeof method !== 'function' || typeof target === 'function')
            throw new TypeError(`@${decorator} must decorate a method of an instance: ${String(key)} is something else`);
        // Nest sets the property of each instance of the class.
        (0, common_1.Inject)(holdfast_1.LockService)(target, LOCKS);
        async function withLock(...args) {
            const locks = this?.[LOCKS];
            if (!locks) {
                const from = `${target.constructor.name}.${String(key)}`;
                throw new Error(`${from}: no lock service was injected; Nest must create the object, with HoldfastModule imported`);
            }
            return run(locks, args, (lock) => {
                const result = running.run(lock, () => method.apply(this, args));
                if (typeof result?.subscribe === 'function' || typeof result?.[Symbol.asyncIterator] === 'function')
                    throw new TypeError(`@${decorator}: ${method.name} must return a promise; an Observable or an iterator would run without the lock`);
                return result;
            });
        }
        Object.defineProperty(withLock, 'name', { value: method.name });
        // Decorators below this one have described the method by metadata.
        for (const metadata of Reflect.getMetadataKeys(method)) {
            Reflect.defineMetadata(metadata, Reflect.getMetadata(metadata, method), withLock);
        }
        descriptor.value = withLock;
    };
}
/** A health indicator for `@nestjs/terminus`: `() => holdfast.isHealthy()` in `health.check([…])`. */
let HoldfastHealthIndicator = class HoldfastHealthIndicator {
    locks;
    constructor(locks) {
        this.locks = locks;
    }
    /**
     * Makes one round trip to the store.
     * @param key the key of the result. Default: `locks`
     */
    async isHealthy(key = 'locks') {
        try {
            return { [key]: { status: 'up', pingMs: await this.locks.ping() } };
        }
        catch (thrown) {
            return { [key]: { status: 'down', message: thrown.message } };
        }
    }
};
exports.HoldfastHealthIndicator = HoldfastHealthIndicator;
exports.HoldfastHealthIndicator = HoldfastHealthIndicator = __decorate([
    (0, common_1.Injectable)(),
    __param(0, (0, common_1.Inject)(holdfast_1.LockService))
], HoldfastHealthIndicator);
/** Closes the service when the application ends, after its HTTP server: `app.close()`, or a signal with `app.enableShutdownHooks()`. */
let Shutdown = class Shutdown {
    locks;
    options;
    constructor(locks, options) {
        this.locks = locks;
        this.options = options;
    }
    async onApplicationShutdown() {
        try {
            await this.locks.close({ drainMs: this.options.drainMs ?? '10s' });
        }
        finally {
            // Also if `drainMs` is invalid.
            await this.locks.close();
        }
    }
};
Shutdown = __decorate([
    (0, common_1.Injectable)(),
    __param(0, (0, common_1.Inject)(holdfast_1.LockService)),
    __param(1, (0, common_1.Inject)(OPTIONS))
], Shutdown);
const PROVIDERS = [
    {
        provide: holdfast_1.LockService,
        inject: [OPTIONS],
        useFactory: ({ drainMs: _, ...options }) => holdfast_1.LockService.connect(options),
    },
    HoldfastHealthIndicator,
    Shutdown,
];
/**
 * Connects a `LockService` for the whole application, and drains it at shutdown.
 *
 * @example
 * @Module({ imports: [HoldfastModule.forRoot({ url: 'redis://127.0.0.1:6379' })] })
 * class AppModule {}
 */
let HoldfastModule = class HoldfastModule {
    /** Connects with these options. */
    static forRoot(options = {}) {
        return moduleOf([{ provide: OPTIONS, useValue: options }]);
    }
    /** Connects with the options that `useFactory` returns, from other providers. */
    static forRootAsync({ imports = [], inject = [], useFactory }) {
        return { ...moduleOf([{ provide: OPTIONS, inject, useFactory }]), imports };
    }
};
exports.HoldfastModule = HoldfastModule;
exports.HoldfastModule = HoldfastModule = __decorate([
    (0, common_1.Module)({})
], HoldfastModule);
function moduleOf(options) {
    return {
        module: HoldfastModule,
        global: true,
        providers: [...options, ...PROVIDERS],
        exports: [holdfast_1.LockService, HoldfastHealthIndicator],
    };
}
