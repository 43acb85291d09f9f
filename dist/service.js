"use strict";
Object.defineProperty(exports, "__esModule", { value: true });
exports.LockService = void 0;
const options_js_1 = require("./options.js");
const errors_js_1 = require("./errors.js");
const lock_js_1 = require("./lock.js");
const native_js_1 = require("./native.js");
const signals_js_1 = require("./signals.js");
const inspect = Symbol.for('nodejs.util.inspect.custom');
// The flags of the native `acquire` (`src/js/service.rs`).
const [RENEW, NO_RENEW, REJECT_BUSY] = [1, 2, 4];
/** Creates the function that receives the messages of one service. It has no reference to the service. */
function receiver(onEvent) {
    return (batch) => {
        for (const message of JSON.parse(batch)) {
            if (message.lost !== undefined)
                (0, signals_js_1.reportLoss)(message.lost, message.error);
            else if (onEvent)
                deliver(onEvent, message);
        }
    };
}
/** Calls `onEvent`. What it throws or rejects with becomes a warning. */
function deliver(onEvent, { type, names, fencingToken, ...parts }) {
    const event = { type, name: names[0], names };
    if (typeof fencingToken === 'string')
        event['fencingToken'] = BigInt(fencingToken);
    for (const [part, value] of Object.entries(parts))
        if (value !== null)
            event[part] = value;
    try {
        const returned = onEvent(event);
        if (typeof returned === 'object' && typeof returned?.then === 'function')
            Promise.resolve(returned).catch(warnOf);
    }
    catch (thrown) {
        warnOf(thrown);
    }
}
function warnOf(thrown) {
    const stack = typeof thrown === 'object' ? thrown?.stack : undefined;
    (0, errors_js_1.warn)(`onEvent failed: ${typeof stack === 'string' ? stack : (0, errors_js_1.describe)(thrown)}`);
}
function infosOf(json) {
    return JSON.parse(json).map(({ remainingMs, fencingToken, holder, metadata, ...info }) => ({
        ...info,
        remainingMs: remainingMs ?? Infinity,
        fencingToken: fencingToken === null ? null : BigInt(fencingToken),
        holder: holder && { ...holder, since: new Date(holder.since) },
        metadata: metadataOf(metadata),
    }));
}
/** Parses the metadata of a lock. Text of another tool that is not JSON is ignored. */
function metadataOf(json) {
    try {
        return json === null ? null : JSON.parse(json);
    }
    catch {
        return null;
    }
}
/**
 * A lock service over one store. Create one per process with `LockService.connect`. Its methods may be detached:
 * `const { acquire } = locks`.
 */
class LockService {
    #native;
    static async connect(target, options) {
        const { config, onEvent } = (0, options_js_1.connectionOf)(target, options);
        try {
            return new LockService(await native_js_1.native.connect(config, receiver(onEvent)));
        }
        catch (thrown) {
            throw (0, errors_js_1.fromNative)(thrown);
        }
    }
    constructor(service) {
        if (!(service instanceof native_js_1.native.LockService)) {
            const origin = 'a LockService comes from `await LockService.connect(…)`, not from new';
            throw new errors_js_1.LockError('LOCK_INVALID_ARGUMENT', origin);
        }
        this.#native = service;
        for (const [name, { value }] of Object.entries(Object.getOwnPropertyDescriptors(LockService.prototype))) {
            if (name === 'constructor')
                continue;
            Object.defineProperty(this, name, { value: value.bind(this), configurable: true, writable: true });
        }
    }
    /**
     * The gist's `acquireLock`: makes one attempt. The lease is not renewed: it ends with its release or after the ttl. A name that
     * this service holds is busy for this service as well.
     * @param ttlSeconds in **seconds**, fractions allowed: more than 0, at most 2147483.648. Default: 30, or `defaults.ttlMs`
     * @returns `true`: this service holds the lock. `false`: the name is busy, or the lease ended before a blocked event loop
     * received it
     * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     */
    async acquireLock(name, ttlSeconds) {
        (0, options_js_1.nameOf)(name);
        const ttlMs = ttlSeconds === undefined ? NaN : (0, options_js_1.secondsOf)(ttlSeconds);
        try {
            return await this.#native.acquireByName(name, ttlMs);
        }
        catch (thrown) {
            throw (0, errors_js_1.fromNative)(thrown);
        }
    }
    /**
     * The gist's `releaseLock`: releases a lock that `acquireLock` of this service acquired, and never another holder's lock.
     * @returns `true`: this call released it. `false`: this service did not hold it (not acquired, expired, or transferred)
     * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     */
    async releaseLock(name) {
        (0, options_js_1.nameOf)(name);
        try {
            return await this.#native.releaseByName(name);
        }
        catch (thrown) {
            throw (0, errors_js_1.fromNative)(thrown);
        }
    }
    async acquireAndExecute(first, second, third) {
        let name;
        let request;
        let fn;
        if (typeof first === 'object' && first !== null && !Array.isArray(first)) {
            const options = (0, options_js_1.fields)('options', first, options_js_1.EXECUTE);
            name = (0, options_js_1.nameOf)(options['name']);
            request = (0, options_js_1.requestOf)(options);
            fn = second;
        }
        else {
            name = (0, options_js_1.nameOf)(first);
            request = (0, options_js_1.requestOf)(undefined);
            const isShort = third === undefined && typeof second === 'function';
            if (!isShort && second !== undefined)
                request.ttlMs = (0, options_js_1.secondsOf)(second);
            fn = isShort ? second : third;
        }
        const run = (0, options_js_1.callback)('fn', fn);
        request.renew ??= false;
        if (Number.isNaN(request.waitMs))
            request.waitMs = 0;
        const lock = await this.#acquire(name, request, 0);
        if (lock === null)
            return undefined;
        try {
            return await run(lock);
        }
        finally {
            await (0, lock_js_1.finishLock)(lock);
        }
    }
    /**
     * Acquires a lock on one name, or on all of up to 1000 names at the same time, and waits while a name is busy.
     * @throws `LOCK_TIMEOUT` when a name is still busy after `waitMs`, `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`,
     * `LOCK_INVALID_ARGUMENT`
     */
    async acquire(names, options) {
        const wanted = (0, options_js_1.namesOf)(names);
        return (await this.#acquire(wanted, (0, options_js_1.requestOf)((0, options_js_1.fields)('options', options, options_js_1.ACQUIRE)), REJECT_BUSY));
    }
    /**
     * Acquires a lock like `acquire`, but makes one attempt and does not wait.
     * @returns the lock; `null` if a name is busy
     * @throws `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     */
    async tryAcquire(names, options) {
        const wanted = (0, options_js_1.namesOf)(names);
        const request = (0, options_js_1.requestOf)((0, options_js_1.fields)('options', options, options_js_1.ACQUIRE));
        request.waitMs = 0;
        return await this.#acquire(wanted, request, 0);
    }
    async using(names, second, third) {
        const wanted = (0, options_js_1.namesOf)(names);
        const isShort = typeof second === 'function' && third === undefined;
        const options = isShort ? undefined : (0, options_js_1.fields)('options', second, options_js_1.ACQUIRE);
        const fn = (0, options_js_1.callback)('fn', isShort ? second : third);
        const lock = (await this.#acquire(wanted, (0, options_js_1.requestOf)(options), REJECT_BUSY));
        let value;
        try {
            value = await fn(lock);
        }
        catch (cause) {
            const loss = await (0, lock_js_1.finishLock)(lock);
            if (loss === null)
                throw cause;
            throw (0, errors_js_1.errorOf)(loss, { cause });
        }
        const loss = await (0, lock_js_1.finishLock)(lock);
        if (loss !== null)
            throw (0, errors_js_1.errorOf)(loss);
        return value;
    }
    /**
     * Transfers a lock of another process or service to this service, from its `toJSON()` or the JSON text of that. The lock gets a
     * new owner token. From then on the former holder can neither extend nor release it. It finds its lock lost at its next
     * renewal or call, so transfer a lock only after its former holder has finished its work.
     * @throws `LOCK_LOST` when the lease has ended or was already transferred, `LOCK_STORE`, `LOCK_CLOSED`,
     * `LOCK_INVALID_ARGUMENT`
     */
    async restore(json) {
        const { names, token, fencingToken, options } = (0, options_js_1.restorationOf)(json);
        try {
            return (0, lock_js_1.createLock)(await this.#native.transfer(names, token, fencingToken, options), names);
        }
        catch (thrown) {
            throw (0, errors_js_1.fromNative)(thrown);
        }
    }
    /**
     * Reads the holder of a name.
     * @returns the state of the lock; `null` if the name is free
     * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     */
    async inspect(name) {
        (0, options_js_1.nameOf)(name);
        try {
            return infosOf(await this.#native.inspect(name))[0] ?? null;
        }
        catch (thrown) {
            throw (0, errors_js_1.fromNative)(thrown);
        }
    }
    /**
     * Lists the held locks whose name starts with `prefix`: literal text, not a pattern. Each page has `storeTimeoutMs`.
     * @returns the locks, sorted by the bytes of their names
     * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     */
    async list(options) {
        const prefix = (0, options_js_1.fields)('options', options, ['prefix'])?.['prefix'];
        const literal = prefix === undefined ? '' : (0, options_js_1.text)('prefix', prefix);
        try {
            return infosOf(await this.#native.list(literal));
        }
        catch (thrown) {
            throw (0, errors_js_1.fromNative)(thrown);
        }
    }
    /**
     * Releases a name, no matter which owner holds it. The holder loses the lock at its next renewal.
     * @returns `true`: the name was held and is free now. `false`: it was free
     * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     */
    async forceRelease(name) {
        (0, options_js_1.nameOf)(name);
        try {
            return await this.#native.forceRelease(name);
        }
        catch (thrown) {
            throw (0, errors_js_1.fromNative)(thrown);
        }
    }
    /** Returns the counters of this service. */
    stats() {
        return JSON.parse(this.#native.stats());
    }
    /**
     * Releases the held locks, ends waits with `LOCK_CLOSED`, and closes the connections. A lock that was held is lost to its
     * holder: its `signal` aborts with `LOCK_LOST`, and `using` rejects with it. Later calls reject with `LOCK_CLOSED`. Takes at
     * most `storeTimeoutMs`, or up to 1 s longer when the store does not answer. May be called again.
     */
    async close() {
        await this.#native.close();
    }
    /** Closes the service like `close()`. */
    async [Symbol.asyncDispose]() {
        await this.#native.close();
    }
    /** @internal Returns what `console.log` shows. */
    [inspect]() {
        const { held, waiting } = this.stats();
        return { engine: this.#native.engine, held, waiting };
    }
    /** Starts the native call of every acquisition. Resolves to `null` if a name is busy. */
    async #acquire(names, request, flags) {
        const { ttlMs, waitMs, renew, signal } = request;
        let { more } = request;
        const call = signal && (0, signals_js_1.listen)(signal);
        if (call)
            more = { ...more, ticket: call.ticket };
        if (renew !== undefined)
            flags |= renew ? RENEW : NO_RENEW;
        let id;
        try {
            id = await this.#native.acquire(names, ttlMs, waitMs, flags, more);
        }
        catch (thrown) {
            throw call?.aborted ? signal.reason : (0, errors_js_1.fromNative)(thrown);
        }
        finally {
            if (call)
                (0, signals_js_1.unlisten)(signal, call);
        }
        if (!call?.aborted)
            return id === 0 ? null : (0, lock_js_1.createLock)(id, names);
        // The grant arrived after the abort.
        if (id !== 0)
            await (0, lock_js_1.createLock)(id, names)[Symbol.asyncDispose]();
        throw signal.reason;
    }
}
exports.LockService = LockService;
