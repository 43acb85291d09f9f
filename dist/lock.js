"use strict";
Object.defineProperty(exports, "__esModule", { value: true });
exports.Lock = exports.finishLock = exports.createLock = void 0;
const errors_js_1 = require("./errors.js");
const native_js_1 = require("./native.js");
const options_js_1 = require("./options.js");
const signals_js_1 = require("./signals.js");
const inspect = Symbol.for('nodejs.util.inspect.custom');
let isWarned = false;
// The native core keeps the number of a lease as long as its Lock is alive.
const registry = new FinalizationRegistry(({ id, name }) => {
    // The lease continues. A program may acquire a lock for its whole life and keep no reference to it. A release by the garbage
    // collector would give the name to a second holder.
    if (!native_js_1.native.forget(id) || isWarned)
        return;
    isWarned = true;
    (0, errors_js_1.warn)(`the Lock of ${JSON.stringify(name)} was garbage collected while it was held. It is renewed until this process ends or its ` +
        'LockService is closed. Keep a reference to the Lock and call release(), or use `await using` or using(). ' +
        'Later locks are not warned about.');
});
/**
 * A held lock. Release it with `release()` or `await using`. A lock that is renewed and dropped without a release stays held
 * until the process ends or the service is closed. When such a lock is garbage collected, one `HoldfastWarning` names it.
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
    /** All names in the order of the call, without duplicates. */
    get names() {
        return typeof this.#names === 'string' ? [this.#names] : [...new Set(this.#names)];
    }
    /** The owner token: 32 random hexadecimal digits, new for each acquisition and each `restore()`. */
    get token() {
        return this.#describe().token;
    }
    /**
     * The fencing token: larger than that of every earlier holder of the name. Store it with each write, and reject a write
     * with a smaller token than the stored one: a former holder, whose lease has ended, can then overwrite nothing.
     */
    get fencingToken() {
        return native_js_1.native.fencingToken(this.#id);
    }
    /**
     * The rest of the lease in milliseconds, by the clock of this process; 0 after the release or loss. It ends earlier than in
     * the store: the ttl counts from the sending of the request, less 1 % and 2 ms.
     */
    get remainingMs() {
        return native_js_1.native.remainingMs(this.#id);
    }
    /** Whether the lease is held: `remainingMs` is not 0. Computed at each read, so also right after the process was suspended. */
    get isHeld() {
        return native_js_1.native.isHeld(this.#id);
    }
    /** Aborts when the lease is lost, with a `LOCK_LOST` error as `reason`. A release does not abort it. */
    get signal() {
        return (this.#signal ??= new signals_js_1.LossSignal(this.#id, this)).signal;
    }
    /**
     * Extends the lease to at least `ttlMs` milliseconds from now on. Later renewals use this ttl as well. Never shortens the
     * lease.
     * @param ttlMs more than 0, at most 2147483648 (2^31) ms, or text with a unit
     * @throws `LOCK_LOST` when the lease is lost or was released, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
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
     * Releases the lock. `isHeld` is `false` from the call on.
     * @returns `true`: this call released it. `false`: it was released before, or is lost
     * @throws `LOCK_STORE` when the store did not answer within `storeTimeoutMs`; the release is repeated in the background
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
    /** Releases the lock like `release()`, but never rejects, so that it hides no error of the block. */
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
     * Returns what another process needs to transfer the lock to itself with `locks.restore()`. The owner token in it is the
     * right to do that: treat it as a secret. It is valid for one `restore()`.
     */
    toJSON() {
        const { token, ttlMs, renew, metadata } = this.#describe();
        const json = { names: this.names, token, fencingToken: String(this.fencingToken), ttlMs, renew };
        return metadata === null ? json : { ...json, metadata: JSON.parse(metadata) };
    }
    /** @internal Returns what `console.log` shows; never the owner token, which is the right to release. */
    [inspect]() {
        return { names: this.names, fencingToken: this.fencingToken, isHeld: this.isHeld, remainingMs: this.remainingMs };
    }
    #describe() {
        return JSON.parse(native_js_1.native.describe(this.#id));
    }
}
exports.Lock = Lock;
