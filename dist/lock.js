"use strict";
Object.defineProperty(exports, "__esModule", { value: true });
exports.Lock = exports.finishLock = exports.createLock = void 0;
const errors_js_1 = require("./errors.js");
const native_js_1 = require("./native.js");
const options_js_1 = require("./options.js");
const signals_js_1 = require("./signals.js");
const inspect = Symbol.for('nodejs.util.inspect.custom');
let isWarned = false;
// The native core knows a lease by a number for as long as its Lock is alive.
const registry = new FinalizationRegistry(({ id, name }) => {
    // The lease goes on. A program may acquire a lock for its whole life and keep no reference to it; a release at a time that
    // the garbage collector chooses would give the name to a second holder.
    if (!native_js_1.native.forget(id) || isWarned)
        return;
    isWarned = true;
    (0, errors_js_1.warn)(`the Lock of ${JSON.stringify(name)} was garbage collected while it was held. It is renewed until this process ends or its ` +
        'LockService is closed. Keep a reference to the Lock and call release(), or use `await using` or using(). ' +
        'Later locks are not warned about.');
});
/**
 * A held lock. Release it with `release()`, or let `await using` do it. A lock that is renewed and dropped without a release
 * stays held until the process ends or the service is closed. When it is garbage collected, one `HoldfastWarning` names it.
 *
 * @example
 * await using lock = await locks.acquire('order:42', { ttlMs: 30_000 })
 */
class Lock {
    static {
        exports.createLock = (id, names) => new Lock(id, names);
        exports.finishLock = async (lock) => {
            const loss = await native_js_1.native.finish(lock.#id);
            lock.#signal?.released();
            return loss;
        };
    }
    #id;
    #names;
    #signal;
    constructor(id, names) {
        if (id === undefined || names === undefined) {
            const origin = 'a Lock comes from acquire, tryAcquire, using or restore of a LockService, not from new';
            throw new errors_js_1.LockError('LOCK_INVALID_ARGUMENT', origin);
        }
        this.#id = id;
        this.#names = names;
        registry.register(this, { id, name: this.name });
    }
    /** The (first) name. */
    get name() {
        return typeof this.#names === 'string' ? this.#names : this.#names[0];
    }
    /** All names, in the order given, without repeats. */
    get names() {
        return typeof this.#names === 'string' ? [this.#names] : [...new Set(this.#names)];
    }
    /** The owner: 32 random hexadecimal digits, fresh per acquisition and per `restore()`. */
    get token() {
        return this.#describe().token;
    }
    /**
     * Strictly larger than that of every earlier holder of the name. Store it with what you write, and refuse a write
     * that carries a smaller one than is stored: a holder that outlived its lease can then do no harm.
     */
    get fencingToken() {
        return native_js_1.native.fencingToken(this.#id);
    }
    /**
     * How long the lease still counts for this process, in milliseconds; 0 once it is released or lost. The cautious
     * view: counted from the sending of the request, less 1 % and 2 ms.
     */
    get remainingMs() {
        return native_js_1.native.remainingMs(this.#id);
    }
    /** Whether the lease still counts. True to the clock at any line, also right after the process was suspended. */
    get isHeld() {
        return native_js_1.native.isHeld(this.#id);
    }
    /** Aborts when the lease is lost, with a `LOCK_LOST` error as `reason`. Never on a normal release. */
    get signal() {
        return (this.#signal ??= new signals_js_1.LossSignal(this.#id, this)).signal;
    }
    /**
     * Makes the lease last at least `ttlMs` milliseconds from now on, and each later renewal ask for it. Never shortens.
     * @throws `LOCK_LOST` when the lease is gone, `LOCK_STORE`, `LOCK_CLOSED`
     */
    async extend(ttlMs) {
        const ms = (0, options_js_1.positiveMs)('ttlMs', ttlMs);
        try {
            await native_js_1.native.extend(this.#id, ms);
        }
        catch (thrown) {
            throw (0, errors_js_1.fromNative)(thrown);
        }
    }
    /**
     * Releases the lock. `isHeld` is false as soon as this is called.
     * @returns `true`: this call freed it. `false`: it was released before, or is lost
     * @throws `LOCK_STORE` when the store did not answer the release in time; it is repeated in the background
     */
    async release() {
        try {
            return await native_js_1.native.release(this.#id);
        }
        catch (thrown) {
            throw (0, errors_js_1.fromNative)(thrown);
        }
        finally {
            this.#signal?.released();
        }
    }
    /** As `release()`, but never rejects: a failing store does not hide what the block did. */
    async [Symbol.asyncDispose]() {
        try {
            await native_js_1.native.release(this.#id);
        }
        catch {
            // The release is repeated in the background.
        }
        this.#signal?.released();
    }
    /**
     * What another process needs to take the lock over with `locks.restore()`. The token in it is the right to do so:
     * treat it as a secret. It is good for one `restore()`.
     */
    toJSON() {
        const { token, ttlMs, renew, metadata } = this.#describe();
        const json = { names: this.names, token, fencingToken: String(this.fencingToken), ttlMs, renew };
        return metadata === null ? json : { ...json, metadata: JSON.parse(metadata) };
    }
    /** @internal What `console.log` shows; never the token, which is the right to release. */
    [inspect]() {
        return { names: this.names, fencingToken: this.fencingToken, isHeld: this.isHeld, remainingMs: this.remainingMs };
    }
    #describe() {
        return JSON.parse(native_js_1.native.describe(this.#id));
    }
}
exports.Lock = Lock;
