'use strict';

var node_fs = require('node:fs');
var node_module = require('node:module');
var node_path = require('node:path');
var node_async_hooks = require('node:async_hooks');
var node_diagnostics_channel = require('node:diagnostics_channel');
var node_os = require('node:os');
var dns = require('node:dns');

/** @internal Creates the `LockInfo`s of the native core's JSON text. `prefix` is that of a view, which is omitted. */
function infosOf(json, prefix) {
    return JSON.parse(json).map(({ name, remainingMs, fencingToken, holder, metadata, waiting }) => withTokenAsText({
        name: withoutPrefix(name, prefix),
        remainingMs: remainingMs ?? Infinity,
        fencingToken: fencingToken === null ? null : BigInt(fencingToken),
        holder: holderOf(holder),
        metadata: metadataOf$1(metadata),
        waiting,
    }));
}
/** @internal Removes the prefix of a view from a name. */
function withoutPrefix(name, prefix) {
    return name.startsWith(prefix) ? name.slice(prefix.length) : name;
}
/** @internal Creates the `Holder` that the native core describes. */
function holderOf(holder) {
    return holder && { host: holder.host, pid: holder.pid, since: new Date(holder.since) };
}
/** Parses the metadata of a lock. Text of another tool that is not JSON is ignored. */
function metadataOf$1(json) {
    try {
        return json === null ? null : JSON.parse(json);
    }
    catch {
        return null;
    }
}
/** @internal Gives an object a `toJSON` that writes its fencing token as decimal text: `JSON.stringify` throws for a bigint. */
function withTokenAsText(value) {
    if (typeof value.fencingToken === 'bigint')
        Object.defineProperty(value, 'toJSON', TO_JSON);
    return value;
}
// Not enumerable: the object has the documented properties only.
const TO_JSON = {
    value: function () {
        return { ...this, fencingToken: String(this.fencingToken) };
    },
    configurable: true,
    writable: true,
};

/** The largest number of frames of this package, and of the tracing channel, between an error and the caller. */
const OWN_FRAMES = 12;
/**
 * The error of every rejection of holdfast. One exception: an aborted wait rejects with `signal.reason` itself. `code` names
 * the case. `instanceof` narrows `code`; {@link isLockError} also accepts errors of another copy of this package.
 */
class LockError extends Error {
    code;
    /** Whether the same call may succeed later, without a change. */
    retryable;
    constructor(code, message, details = {}) {
        super(message, 'cause' in details ? { cause: details.cause } : undefined);
        // Adds the code to the stack, which V8 formats at the first read.
        const trace = { name: `LockError [${code}]`, message };
        // Raises the limit, so that the frames of this package do not displace those of the caller.
        const limit = Error.stackTraceLimit;
        if (limit > 0)
            Reflect.set(Error, 'stackTraceLimit', limit + OWN_FRAMES);
        Error.captureStackTrace(trace, new.target);
        if (limit > 0)
            Reflect.set(Error, 'stackTraceLimit', limit);
        Object.defineProperty(this, 'stack', {
            configurable: true,
            get: () => trace.stack,
            set(stack) {
                trace.stack = stack;
            },
        });
        this.code = code;
        this.retryable = details.retryable ?? false;
        if (details.key !== undefined)
            this.key = details.key;
        if (details.engine !== undefined)
            this.engine = details.engine;
        if (code !== 'LOCK_TIMEOUT')
            return;
        this.holder = details.holder ?? null;
        this.remainingMs = details.remainingMs ?? null;
    }
}
Object.defineProperty(LockError.prototype, 'name', { value: 'LockError', configurable: true, writable: true });
/**
 * Returns whether a value is a {@link LockError} of this or another copy of this package.
 *
 * @param code accepts only this code, and narrows the type to it
 */
function isLockError(value, code) {
    if (typeof value !== 'object' || value === null)
        return false;
    const error = value;
    return (error.name === 'LockError' && typeof error.retryable === 'boolean' && (code === undefined || error.code === code));
}
/**
 * @internal Creates the `LockError` that the native core describes.
 *
 * @param prefix the prefix of a view (`withPrefix`), which the error omits from names
 * @param more overrides details
 */
function errorOf(native, prefix, more) {
    const { code, message, retryable, key, engine, cause, busy } = typeof native === 'string' ? JSON.parse(native) : native;
    const details = {
        retryable,
        key: typeof key === 'string' ? withoutPrefix(key, prefix) : undefined,
        engine: engine ?? undefined,
        ...(cause === null ? {} : { cause: driverError(cause) }),
        ...(busy ? { holder: holderOf(busy.holder), remainingMs: busy.remainingMs ?? Infinity } : {}),
        ...more,
    };
    const quoted = JSON.stringify(prefix).slice(0, -1);
    return new LockError(code, prefix === '' ? message : message.replaceAll(quoted, '"'), details);
}
/** Creates the error of a driver, without a JavaScript stack. */
function driverError(message) {
    return Object.defineProperty(new Error(message), 'stack', {
        value: `Error: ${message}`,
        configurable: true,
        writable: true,
    });
}
/** @internal Converts the rejection of a native promise to a `LockError`. */
function fromNative(thrown, prefix) {
    return typeof thrown === 'string' ? errorOf(thrown, prefix) : thrown;
}
/** @internal Creates the error of an invalid argument. */
function invalid(argument, rule, got) {
    return new LockError('LOCK_INVALID_ARGUMENT', `${argument} ${rule}, got ${got}`);
}
/** @internal Returns a short text that shows a value in a message. */
function describe(value) {
    switch (typeof value) {
        case 'undefined':
        case 'boolean':
            return String(value);
        case 'number':
            return Object.is(value, -0) ? '-0' : String(value);
        case 'string': {
            const shown = JSON.stringify([...value.slice(0, 120).toWellFormed()].slice(0, 60).join(''));
            return value.length <= 60 ? shown : `${shown}… (${Buffer.byteLength(value)} bytes)`;
        }
        case 'function':
            return 'a function';
        case 'object':
            return value === null ? 'null' : Array.isArray(value) ? 'an array' : 'an object';
        default:
            return 'a symbol, bigint or external';
    }
}
/** @internal Returns the stack of what a function of the user threw, or a short text that shows it. */
function stackOf(thrown) {
    try {
        const stack = typeof thrown === 'object' ? thrown?.stack : undefined;
        return typeof stack === 'string' ? stack : describe(thrown);
    }
    catch {
        // The value is the user's: a getter of it may throw.
        return 'with a value that cannot be shown';
    }
}
/** @internal Emits a `HoldfastWarning` with a code. */
function warn(code, text) {
    process.emitWarning(text, { type: 'HoldfastWarning', code });
}

// For bundlers: one `require` per platform with a literal path. The build writes the folder. Its `main` is the addon in the package
// of the platform. Without that package, a bundler uses the empty `index.js` of the folder, without a warning.
const BUNDLED = {
    'linux-x64-gnu': () => require('./addons/linux-x64-gnu'),
    'linux-x64-musl': () => require('./addons/linux-x64-musl'),
    'linux-arm64-gnu': () => require('./addons/linux-arm64-gnu'),
    'linux-arm64-musl': () => require('./addons/linux-arm64-musl'),
    'darwin-x64': () => require('./addons/darwin-x64'),
    'darwin-arm64': () => require('./addons/darwin-arm64'),
    'win32-x64-msvc': () => require('./addons/win32-x64-msvc'),
};
// Bundlers do not follow this `require`.
const open = node_module.createRequire(__filename);
function load() {
    const override = process.env['NAPI_RS_NATIVE_LIBRARY_PATH'];
    if (override)
        return open(override);
    const platform = `${process.platform}-${process.arch}`;
    const failures = [];
    // On Linux with musl, the addon for glibc is tried first, and does not load.
    for (const target of Object.keys(BUNDLED).filter((target) => target.startsWith(platform))) {
        try {
            const built = node_path.join(__dirname, '..', `holdfast.${target}.node`);
            if (node_fs.existsSync(built))
                return open(built);
            // A bundle has no such folder.
            const bundled = node_fs.existsSync(node_path.join(__dirname, 'addons')) ? {} : BUNDLED[target]();
            if (bundled.connect)
                return bundled;
            // By its file: a traced copy (Next.js, @vercel/nft) has the addon without its package.json.
            return open(`holdfast-${target}/holdfast.${target}.node`);
        }
        catch (error) {
            failures.push(error);
        }
    }
    const install = 'with its optional dependencies (npm install holdfast --include=optional)';
    // An addon that exists reports why it does not load. On Linux the package of the other C library is usually not installed.
    const broken = failures.filter((failure) => !String(failure?.code).endsWith('MODULE_NOT_FOUND'));
    if (broken.length === 0) {
        const build = 'or build it from a checkout with `npm run build`, which needs Rust';
        throw new Error(`holdfast has no native addon for ${platform} here: install it ${install}, ${build}.`, {
            cause: failures[0],
        });
    }
    const reasons = broken.map((failure) => String(failure?.message).trim()).join('; ');
    throw new Error(`the native addon of holdfast does not load (${reasons}): install it again on this system, ${install}.`, {
        cause: broken[0],
    });
}
/** @internal */
const native = load();

const MAX_MS = 2 ** 31;
const HOUR_MS = 3_600_000;
const DAY_MS = 24 * HOUR_MS;
/** The ttls from here on are checked: milliseconds that were given as seconds are that long. */
const CHECKED_MS = 10_000_000;
/** @internal The renewal of a shorter lease may come too late. */
const SHORT_MS$1 = 100;
/** @internal The other form of a duration, for errors. */
const OR_TEXT = ", or text with a unit such as '30s'";
const UNITS = { ms: 1, s: 1000, m: 60_000, h: HOUR_MS };
/** @internal Converts a number, or text with a unit such as `'30s'`, to milliseconds. Other values give `NaN`. */
function milliseconds(value) {
    if (typeof value === 'number')
        return value;
    const [, amount, unit] = (typeof value === 'string' && /^(\d+(?:\.\d+)?)(ms|s|m|h)$/.exec(value)) || [];
    return amount === undefined ? NaN : Number(amount) * UNITS[unit];
}
/** @internal Checks a duration: more than zero, at most 2^31 ms. Returns milliseconds. */
function positiveMs(argument, value) {
    const ms = milliseconds(value);
    if (ms > 0 && ms <= MAX_MS)
        return ms;
    throw invalid(argument, `must be a number of milliseconds, more than 0 and at most 2147483648${OR_TEXT}`, describe(value));
}
/** @internal Checks a duration that may be zero. Returns milliseconds. */
function spanMs(argument, value) {
    const ms = milliseconds(value);
    if (ms >= 0 && ms <= MAX_MS)
        return ms;
    throw invalid(argument, `must be a number of milliseconds from 0 to 2147483648${OR_TEXT}`, describe(value));
}
/** @internal Checks a `ttlMs`. Returns milliseconds. */
function ttlOf(value) {
    const ms = positiveMs('ttlMs', value);
    if (ms >= CHECKED_MS)
        warnIfLong('ttlMs', value, ms);
    return ms;
}
/** @internal Checks the `ttlSeconds` of the gist's functions. Returns milliseconds. */
function secondsOf(value) {
    const ms = typeof value === 'number' ? value * 1000 : NaN;
    if (!(ms > 0 && ms <= MAX_MS)) {
        throw invalid('ttlSeconds', 'must be a number of seconds, more than 0 and at most 2147483.648', describe(value));
    }
    if (ms >= CHECKED_MS)
        warnIfLong('ttlSeconds', value, ms);
    return ms;
}
/** @internal Warns of a ttl below {@link SHORT_MS} of a lease that is renewed. */
function warnIfShort(option, value, ms) {
    if (warned.short)
        return;
    warned.short = true;
    warnOfTtl(option, value, ms, 1000, 'A lease of less than 100 ms may end before its renewal.');
}
/** Checks a long ttl: more than 24 h, or whole thousands of seconds that are not whole hours, which are probably milliseconds. */
function warnIfLong(option, value, ms) {
    const isProbablyMs = option === 'ttlSeconds' && ms % 1_000_000 === 0 && ms % HOUR_MS !== 0;
    if (warned.long || (ms <= DAY_MS && !isProbablyMs))
        return;
    warned.long = true;
    const risk = 'If the process of the holder ends without a release, the name stays busy for that long (on ZooKeeper: for the session timeout).';
    warnOfTtl(option, value, ms, 1 / 1000, risk);
}
// One warning of each kind per process.
const warned = { long: false, short: false };
/** Emits a warning with both readings of a number without a unit. `factor`: from one reading to the other. */
function warnOfTtl(option, value, ms, factor, risk) {
    const isNumber = typeof value === 'number';
    const given = isNumber ? `${value} ${option === 'ttlMs' ? 'ms' : 's'}` : String(value);
    const amount = ms < HOUR_MS ? (option === 'ttlMs' ? `${ms / 1000} s` : `${ms} ms`) : `${Number((ms / HOUR_MS).toFixed(1))} h`;
    const other = isNumber ? `; did you mean ${Number((value * factor).toPrecision(6))}?` : '.';
    warn('HOLDFAST_TTL', `${option}: ${given} is ${amount}${other} ${risk} Later ones are not warned about.`);
}

// One listener per signal, for any number of waiting calls: with more than ten listeners Node warns of a leak.
const groups = new WeakMap();
let lastTicket = 0;
/** @internal Returns a new number for `native.cancel`. */
const newTicket = () => ++lastTicket;
/** @internal What cancels a call that waits for its service to connect, by ticket. */
const unstarted = new Map();
function removeListener(signal, { listener }) {
    groups.delete(signal);
    try {
        signal.removeEventListener('abort', listener);
    }
    catch {
        // The listener stays. It has no effect.
    }
}
/** @internal Adds a call to the listener of its caller's signal. Throws the reason of an aborted signal. */
function listen(signal) {
    if (signal.aborted)
        throw signal.reason;
    const call = { ticket: newTicket(), aborted: false };
    const known = groups.get(signal);
    if (known) {
        known.calls.add(call);
        return call;
    }
    const listener = () => {
        if (groups.get(signal) !== group)
            return;
        removeListener(signal, group);
        for (const waiting of group.calls) {
            waiting.aborted = true;
            native.cancel(waiting.ticket);
            unstarted.get(waiting.ticket)?.();
        }
    };
    const group = { calls: new Set([call]), listener };
    groups.set(signal, group);
    try {
        signal.addEventListener('abort', listener);
    }
    catch (thrown) {
        groups.delete(signal);
        throw thrown;
    }
    // A signal may call the listener at once.
    if (call.aborted)
        throw signal.reason;
    return call;
}
/** @internal Removes a call. Removes the listener with the last call of the signal. */
function unlisten(signal, call) {
    const group = groups.get(signal);
    if (group?.calls.delete(call) && group.calls.size === 0)
        removeListener(signal, group);
}
// The locks whose signal was read, by the number of the lease. The map keeps such a lock alive until the lease has ended.
const watched = new Map();
const LIVE = ['aborted', 'reason', 'throwIfAborted'];
/** @internal Aborts the signal of a lock whose loss the native core reported. */
function reportLoss(id, error) {
    watched.get(id)?.lose(error);
}
/**
 * @internal Aborts the signal of a lock when the lease is lost.
 *
 * After the process was suspended, the user's code may run before the event loop delivers the loss. So until then `aborted`,
 * `reason` and `throwIfAborted` are properties of the signal itself: they read the native clock, and abort the signal if the
 * lease is lost. They are removed when the lease ends: the signal is then an ordinary one.
 */
class LossSignal {
    owner;
    signal;
    #id;
    #prefix;
    #controller = new AbortController();
    /** The asynchronous context in which the signal was first read: its listeners run there. */
    #context = new node_async_hooks.AsyncResource('HOLDFAST');
    /**
     * @param owner the `Lock`, which stays alive as long as the signal may abort
     * @param prefix the prefix of a view, which errors omit
     */
    constructor(id, owner, prefix) {
        this.owner = owner;
        this.#id = id;
        this.#prefix = prefix;
        const { signal } = this.#controller;
        this.signal = signal;
        if (native.watch(id)) {
            watched.set(id, this);
            for (const name of LIVE)
                Object.defineProperty(signal, name, { configurable: true, ...this.#live(name) });
        }
        this.#check();
    }
    /** Returns the property that reads the native clock. */
    #live(name) {
        const { signal } = this.#controller;
        if (name === 'throwIfAborted')
            return { value: () => this.#check() && signal.throwIfAborted() };
        return { get: () => (this.#check() ? signal[name] : name === 'aborted' ? false : undefined) };
    }
    /** Aborts the signal if the lease is lost by the native clock. */
    #check() {
        const loss = native.loss(this.#id);
        if (loss == null)
            return false;
        this.lose(loss);
        return true;
    }
    /** Aborts the signal with the error that the native core describes. */
    lose(error) {
        this.abort(errorOf(error, this.#prefix));
    }
    /** Aborts the signal. */
    abort(reason) {
        this.settle();
        this.#context.runInAsyncScope(() => this.#controller.abort(reason));
    }
    /** Makes the signal an ordinary one: the lease has ended. */
    settle() {
        if (!watched.delete(this.#id))
            return;
        for (const name of LIVE)
            Reflect.deleteProperty(this.#controller.signal, name);
    }
    /** Handles the release of the lock. A loss before the release still aborts the signal. */
    released() {
        if (native.loss(this.#id) == null)
            this.settle();
    }
}

const inspect$1 = Symbol.for('nodejs.util.inspect.custom');
let isWarned$1 = false;
// The native core keeps the number of a lease until its release, or as long as its Lock is alive.
const registry = new FinalizationRegistry((id) => {
    // The lease continues. A program may acquire a lock for its whole life and keep no reference to it. A release by the garbage
    // collector would give the name to a second holder.
    const name = native.forget(id);
    if (name == null || isWarned$1)
        return;
    isWarned$1 = true;
    warn('HOLDFAST_NOT_RELEASED', `the Lock of ${JSON.stringify(name)} was garbage collected while it was held. It is renewed until this process ends or its ` +
        'LockService is closed. Keep a reference to the Lock and call release(), or use `await using` or using(). ' +
        'Later locks are not warned about.');
});
/** @internal Creates a `Lock` from the number of its lease. `prefix` is that of a view, which errors omit. */
let createLock;
/** @internal Has the number of a `Lock` removed when the `Lock` is garbage collected. A job needs that only after a loss. */
let registerLock;
/** @internal Releases the lock of `using` or `acquireAndExecute`. Resolves to the JSON text of its loss, or to `null`. */
let finishLock;
/** @internal Keeps the name of a lock busy after its release, until `ms` milliseconds have passed since the grant. */
let holdAtLeast;
/** @internal Aborts the signal of a lock that stays held. */
let abortSignal;
/**
 * A held lock. Release it with `release()` or `await using`. A lock that is renewed and dropped without a release stays held
 * until the process ends or the service is closed. When such a lock is garbage collected, one `HoldfastWarning` names it.
 *
 * @example
 * await using lock = await locks.acquire('order:42', { ttlMs: 30_000 })
 */
class Lock {
    static {
        createLock = (id, names, prefix) => new Lock(id, names, prefix);
        registerLock = (lock) => {
            registry.register(lock, lock.#id, lock);
            return lock;
        };
        holdAtLeast = (lock, ms) => native.setMinHold(lock.#id, ms);
        abortSignal = (lock, reason) => lock.#lossSignal().abort(reason);
        finishLock = async (lock) => {
            try {
                // Not released by this call: the job released it, and may have had no answer.
                if (!lock.#end(await native.finish(lock.#id)) && lock.#ended === undefined)
                    registerLock(lock);
                return null;
            }
            catch (loss) {
                registerLock(lock);
                return loss;
            }
            finally {
                lock.#signal?.released();
            }
        };
    }
    #id;
    #names;
    #prefix;
    #signal;
    /** The description of a lease that was released. */
    #ended;
    constructor(id, names, prefix = '') {
        if (id === undefined || names === undefined) {
            const origin = 'a Lock comes from acquire, tryAcquire, using or restore of a LockService, not from new';
            throw new LockError('LOCK_INVALID_ARGUMENT', origin);
        }
        this.#id = id;
        this.#names = names;
        this.#prefix = prefix;
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
        return this.#describe()[0];
    }
    /**
     * The fencing token: larger than that of every earlier holder of the name. Store it with each write, and reject a write
     * with a smaller token than the stored one: a former holder, whose lease has ended, can then overwrite nothing.
     */
    get fencingToken() {
        return BigInt(this.#describe()[1]);
    }
    /**
     * The rest of the lease in milliseconds, by the clock of this process; 0 after the release or loss. It ends earlier than in the
     * store: the ttl counts from the sending of the request, less 1 % and 2 ms. For some 10 to 50 ms after a wait it is at most 4500
     * (MongoDB replica set, etcd, ZooKeeper: 2000), until a renewal extends the lease to its ttl. `extend()` waits for that renewal.
     */
    get remainingMs() {
        return native.remainingMs(this.#id);
    }
    /** Whether the lease is held: `remainingMs` is not 0. Computed at each read, so also right after the process was suspended. */
    get isHeld() {
        return native.isHeld(this.#id);
    }
    /**
     * Aborts when the lease is lost, with a `LOCK_LOST` error as `reason`. A release does not abort it. Its listeners run in the
     * `AsyncLocalStorage` context in which it was first read.
     */
    get signal() {
        return this.#lossSignal().signal;
    }
    #lossSignal() {
        return (this.#signal ??= new LossSignal(this.#id, this, this.#prefix));
    }
    /**
     * Extends the lease to at least `ttlMs` milliseconds from now on. Later renewals use this ttl as well. Never shortens the
     * lease.
     * @param ttlMs more than 0, at most 2147483648 (2^31) ms, or text with a unit
     * @throws `LOCK_LOST` when the lease is lost or was released, or when it ends before the store answers; `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     *
     * @example
     * await lock.extend('1m')
     */
    async extend(ttlMs) {
        const ms = ttlOf(ttlMs);
        if (this.#ended !== undefined) {
            const message = `the lock ${JSON.stringify(this.name)} is lost: it was released`;
            throw new LockError('LOCK_LOST', message, { key: this.name });
        }
        try {
            await native.extend(this.#id, ms);
        }
        catch (thrown) {
            throw fromNative(thrown, this.#prefix);
        }
    }
    /**
     * Releases the lock. `isHeld` is `false` from the call on.
     * @returns `true`: it was held until this call, which released it. `false`: it was released before, or is lost. `true` is an
     * assumption if the store no longer has the lock, and either the reply to an earlier request was lost, or the answer came after
     * the end of the lease: before this call the store may have lost its data, or another process may have restored the lock
     * @throws `LOCK_STORE` when the store did not answer within `storeTimeoutMs`; the release is repeated in the background
     *
     * @example
     * if (!(await lock.release())) console.log('it was lost')
     */
    async release() {
        try {
            return this.#end(await native.release(this.#id));
        }
        catch (thrown) {
            throw fromNative(thrown, this.#prefix);
        }
        finally {
            this.#signal?.released();
        }
    }
    /**
     * Releases the lock like `release()`, but never rejects, so that it hides no error of the block.
     *
     * @example
     * await using lock = await locks.acquire('order:42')
     */
    async [Symbol.asyncDispose]() {
        try {
            this.#end(await native.release(this.#id));
        }
        catch {
            // The release is repeated in the background.
        }
        this.#signal?.released();
    }
    /**
     * Returns what another process needs to transfer the lock to itself with `locks.restore()`. The owner token in it is the
     * right to do that: treat it as a secret. It is valid for one `restore()`.
     *
     * @example
     * channel.send(JSON.stringify(lock.transferable())) // there: await locks.restore(text)
     */
    transferable() {
        const [token, fencingToken, ttlMs, renew, ...metadata] = this.#describe();
        const lock = {
            names: this.names,
            token: token,
            fencingToken: fencingToken,
            ttlMs: Number(ttlMs),
            renew: renew === 'true',
        };
        const json = metadata.join(' ');
        return json === '' ? lock : { ...lock, metadata: JSON.parse(json) };
    }
    /**
     * Returns what `JSON.stringify` shows, for logs: never the owner token. {@link transferable} returns it.
     *
     * @example
     * console.log(JSON.stringify({ message: 'acquired', lock }))
     */
    toJSON() {
        const { name, names, isHeld, remainingMs } = this;
        return { name, names, fencingToken: this.#describe()[1], isHeld, remainingMs };
    }
    /** @internal Returns what `console.log` shows; never the owner token, which is the right to release. */
    [inspect$1]() {
        return { names: this.names, fencingToken: this.fencingToken, isHeld: this.isHeld, remainingMs: this.remainingMs };
    }
    /** Returns the parts of the description of the lease (`describe` in `addon.d.ts`). */
    #describe() {
        return (this.#ended ?? native.describe(this.#id)).split(' ');
    }
    /** Handles the end of a release. Returns whether it released the lease, whose number is not needed any more. */
    #end(description) {
        if (description === null)
            return false;
        this.#ended = description;
        registry.unregister(this);
        native.forget(this.#id);
        return true;
    }
}

// The flags of the native `acquire` (`src/js/service.rs`).
const [RENEW, NO_RENEW] = [1, 2];
/** @internal The flag of a call that rejects with `LOCK_TIMEOUT` when a name is busy. Without it the call resolves to `null`. */
const REJECT_BUSY = 4;
/** @internal The flag of a call that does not keep the process alive. */
const IN_BACKGROUND = 8;
let isWarned = false;
// The registered object is `jobs`, which a service, its views, its elections and its watches share.
const dropped = new FinalizationRegistry(async ({ native, source, connectedTo }) => {
    if (!(await native.closeUnused()))
        return;
    source.isClosed = true;
    if (isWarned || source.engine === 'memory')
        return;
    isWarned = true;
    warn('HOLDFAST_NOT_CLOSED', `a LockService (${connectedTo}) was garbage collected without close(): it had no locks, and its connections are closed now. ` +
        'Call close(), or use `await using`, when a service is not needed any more. Later services are not warned about.');
});
/** @internal Closes the connections when everything that uses them is garbage collected. */
function register(connection) {
    const { native, source, connectedTo, jobs } = connection;
    dropped.register(jobs, { native, source, connectedTo }, jobs);
    return connection;
}
/** @internal Reverts `register`: a call closes the connections. */
function unregister({ jobs }) {
    dropped.unregister(jobs);
}
/** @internal Returns the URLs of a store without user, password and parameters, for `console.log`. */
function shownUrls(urls) {
    return urls.length === 0 ? 'sqlite: (the embedded store)' : urls.map(shownUrl).join(', ');
}
function shownUrl(url) {
    const [, scheme, rest] = /^([^:/?#]+:\/\/)(.*)$/s.exec(url) ?? ['', '', url];
    const server = rest.replace(/[?#].*/s, '');
    // A password that is not percent-encoded may contain any of these characters.
    const isUnclear = !server.includes('@') || (scheme === '' && !/^(sqlite|memory):/.test(url));
    if (isUnclear && rest.includes('@'))
        return `${scheme}…`;
    return scheme + server.slice(scheme === '' ? 0 : server.lastIndexOf('@') + 1);
}
/** @internal Returns a name with the prefix of the view. */
function fullName({ prefix }, name) {
    if (prefix === '')
        return name;
    // The native core checks the name with its prefix.
    if (name === '')
        throw invalid('name', 'must not be empty', '""');
    return prefix + name;
}
/** @internal Makes the native call of `acquireLock`. */
async function acquireByName({ native, prefix }, name, ttlMs) {
    try {
        return await native.acquireByName(name, ttlMs);
    }
    catch (thrown) {
        throw fromNative(thrown, prefix);
    }
}
/** @internal Makes the native call of the other acquisitions. Resolves to `null` if a name is busy. */
async function acquire(connection, names, request, flags) {
    const { ttlMs, waitMs, renew, signal } = request;
    const { prefix } = connection;
    let full = names;
    if (prefix !== '')
        full = typeof names === 'string' ? fullName(connection, names) : names.map((name) => fullName(connection, name));
    let { more } = request;
    const call = signal && listen(signal);
    if (call)
        more = { ...more, ticket: call.ticket };
    if (renew !== undefined)
        flags |= renew ? RENEW : NO_RENEW;
    let id;
    try {
        id = await connection.native.acquire(full, ttlMs, waitMs, flags, more);
    }
    catch (thrown) {
        throw call?.aborted ? signal.reason : fromNative(thrown, prefix);
    }
    finally {
        if (call)
            unlisten(signal, call);
    }
    if (!call?.aborted)
        return id === 0 ? null : createLock(id, names, prefix);
    // The grant arrived after the abort.
    if (id !== 0)
        await registerLock(createLock(id, names, prefix))[Symbol.asyncDispose]();
    throw signal.reason;
}

const MAX_METADATA_BYTES = 16 * 1024;
const MAX_NAMES = 1000;
/** @internal The options of `acquire`, `tryAcquire`, `using` and `tryUsing`. */
const ACQUIRE$1 = 'ttlMs waitMs renew signal maxHoldMs stallLimitMs minHoldMs metadata onStoreError'.split(' ');
/** @internal The object form of `acquireAndExecute`. */
const EXECUTE = ['name', 'ttlSeconds', ...ACQUIRE$1];
/** @internal The options of `oncePer`. */
const ONCE = ['periodMs', ...ACQUIRE$1.filter((name) => name !== 'minHoldMs')];
/** @internal The options of `elect`. */
const ELECT = ['ttlMs', 'stallLimitMs', 'metadata', 'signal', 'restart', 'onError', 'unref'];
/** @internal A service's defaults of these options do not apply to `elect` and `oncePer`: they end a leadership, and set a period. */
const UNLIMITED = { minHoldMs: 0, maxHoldMs: Infinity };
/** @internal The options of `watch`. */
const WATCH = ['intervalMs', 'signal'];
/** @internal The `defaults` of a service. */
const DEFAULTS = ['ttlMs', 'waitMs', 'renew', 'maxHoldMs', 'stallLimitMs', 'minHoldMs', 'onStoreError'];
const RESTORE = ['names', 'token', 'fencingToken', 'ttlMs', 'renew', 'metadata'];
/** Options of other libraries, in lower case, by their names here. Of several, the first one that an object may have is meant. */
const ALIASES = {
    storeTimeoutMs: ['timeout', 'commandtimeout', 'sockettimeout', 'connecttimeout', 'serverselectiontimeoutms'],
    waitMs: ('timeout acquiretimeout acquiretimeoutms retry retries retrycount retrydelay retryjitter retryinterval maxretries ' +
        'maxattempts acquireattemptslimit maxwait').split(' '),
    ttlMs: ['ttl', 'ttlms', 'ttlseconds', 'duration', 'expiry', 'expire', 'expires', 'lease', 'leasetime', 'locktimeout'],
    renew: ['autoextend', 'extend', 'refresh', 'refreshinterval', 'automaticextensionthreshold'],
    keyPrefix: ['prefix', 'namespace'],
    url: ['uri', 'target', 'connectionstring'],
    database: ['db'],
    username: ['user'],
    password: ['pass', 'auth'],
};
/** @internal Returns whether a value is an object, and no array. */
const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);
/**
 * @internal Checks an object of options. Rejects a promise that was not awaited and a `Map`, which have no options of their
 * own, and unknown options, which may be misspelt.
 */
function fields(argument, value, known) {
    if (value === undefined)
        return undefined;
    if (!isObject(value) || Object.prototype.toString.call(value) !== '[object Object]') {
        throw invalid(argument, 'must be a plain object', describe(value));
    }
    for (const key of Object.keys(value)) {
        if (known.includes(key))
            continue;
        const meant = meantBy(key, known);
        const suggestion = meant === undefined ? '' : ` (did you mean ${meant}?)`;
        throw invalid(argument, `may have ${known.join(', ')}${suggestion}`, JSON.stringify(key.toWellFormed()));
    }
    return value;
}
/** Returns the option that an unknown option probably means. */
function meantBy(key, known) {
    const lower = key.toLowerCase();
    const [meant] = [
        ...known.filter((name) => key && name.toLowerCase().startsWith(lower)),
        ...Object.keys(ALIASES).filter((name) => known.includes(name) && ALIASES[name].includes(lower)),
    ];
    if (meant !== undefined || !known.includes('defaults'))
        return meant;
    const ofCalls = meantBy(key, DEFAULTS);
    return ofCalls && `defaults.${ofCalls}`;
}
/** @internal Checks a string. */
function text(argument, value) {
    if (typeof value !== 'string')
        throw invalid(argument, 'must be a string', describe(value));
    // UTF-8 has no lone surrogates: different names would become the same one.
    if (!value.isWellFormed()) {
        throw invalid(argument, 'must be well-formed Unicode (it has a lone surrogate)', describe(value));
    }
    return value;
}
/** @internal Checks the name of a lock. The native core checks its length. */
const nameOf = (value) => text('name', value);
/** @internal Checks a name, or an array of names, which it copies. */
function namesOf(value) {
    if (typeof value === 'string')
        return nameOf(value);
    if (!Array.isArray(value))
        throw invalid('names', 'must be a string or an array of strings', describe(value));
    if (value.length === 0)
        throw invalid('names', 'must not be empty', '[]');
    if (value.length > MAX_NAMES)
        throw invalid('names', `must be at most ${MAX_NAMES} names`, String(value.length));
    return Array.from({ length: value.length }, (_, index) => nameOf(value[index]));
}
/** @internal Checks a function. */
function callback(argument, value) {
    if (typeof value !== 'function')
        throw invalid(argument, 'must be a function', describe(value));
    return value;
}
/** @internal Checks a boolean. */
function flag(argument, value) {
    if (typeof value !== 'boolean')
        throw invalid(argument, 'must be true or false', describe(value));
    return value;
}
function metadataOf(value) {
    const rule = 'must be a value that JSON can represent';
    let json;
    try {
        json = JSON.stringify(value);
    }
    catch (cause) {
        // A circular object or a bigint, or the value's own `toJSON` threw.
        const { message } = invalid('metadata', rule, describe(value));
        throw new LockError('LOCK_INVALID_ARGUMENT', message, { cause });
    }
    // A function or a symbol has no JSON.
    if (typeof json !== 'string')
        throw invalid('metadata', rule, describe(value));
    const bytes = Buffer.byteLength(json);
    if (bytes > MAX_METADATA_BYTES) {
        throw invalid('metadata', `must be at most ${MAX_METADATA_BYTES} bytes of JSON`, `${bytes} bytes`);
    }
    return json;
}
/** @internal Checks an `AbortSignal` by its members: signals of other realms and polyfills are accepted. */
function signalOf(value) {
    if (isObject(value)) {
        const { aborted, addEventListener, removeEventListener } = value;
        const areFunctions = typeof addEventListener === 'function' && typeof removeEventListener === 'function';
        if (typeof aborted === 'boolean' && areFunctions)
            return value;
    }
    throw invalid('signal', 'must be an AbortSignal', describe(value));
}
/** @internal Checks the options of an acquisition. `renews`: the default of `renew`. */
function requestOf(options, renews) {
    const request = { ttlMs: NaN, waitMs: NaN, renew: undefined, more: undefined, signal: undefined };
    if (options === undefined)
        return request;
    let value;
    let ttl;
    if ((ttl = options['ttlMs']) !== undefined)
        request.ttlMs = ttlOf(ttl);
    if ((value = options['ttlSeconds']) !== undefined) {
        if (ttl !== undefined)
            throw invalid('ttlSeconds', 'must be absent when ttlMs is present', describe(value));
        request.ttlMs = secondsOf(value);
    }
    if ((value = options['waitMs']) !== undefined) {
        request.waitMs = milliseconds(value);
        if (!(request.waitMs >= 0)) {
            throw invalid('waitMs', `must be a number of milliseconds, 0 or more, Infinity${OR_TEXT}`, describe(value));
        }
    }
    if ((value = options['renew']) !== undefined)
        request.renew = flag('renew', value);
    if (request.ttlMs < SHORT_MS$1 && (request.renew ?? renews)) {
        if (ttl === undefined)
            warnIfShort('ttlSeconds', options['ttlSeconds'], request.ttlMs);
        else
            warnIfShort('ttlMs', ttl, request.ttlMs);
    }
    const more = {};
    if ((value = options['maxHoldMs']) !== undefined)
        more.maxHoldMs = positiveMs('maxHoldMs', value);
    if ((value = options['stallLimitMs']) !== undefined)
        more.stallLimitMs = positiveMs('stallLimitMs', value);
    if ((value = options['minHoldMs']) !== undefined)
        more.minHoldMs = spanMs('minHoldMs', value);
    if ((value = options['onStoreError']) !== undefined) {
        if (value !== 'fail' && value !== 'wait')
            throw invalid('onStoreError', "must be 'fail' or 'wait'", describe(value));
        more.waitsForStore = value === 'wait';
    }
    if ((value = options['metadata']) !== undefined && value !== null)
        more.metadata = metadataOf(value);
    for (const _ in more)
        request.more = more;
    if ((value = options['signal']) !== undefined)
        request.signal = signalOf(value);
    return request;
}
/** @internal Returns a request as one record. */
function recordOf({ ttlMs, waitMs, renew, more }) {
    const record = { ...more };
    if (!Number.isNaN(ttlMs))
        record.ttlMs = ttlMs;
    if (!Number.isNaN(waitMs))
        record.waitMs = waitMs;
    if (renew !== undefined)
        record.renew = renew;
    return record;
}
/** @internal Checks the result of `lock.transferable()`, or its JSON text. Returns its parts. */
function restorationOf(argument) {
    const rule = 'must be the result of lock.transferable()';
    let value = argument;
    if (typeof argument === 'string') {
        const source = text('transferable', argument);
        try {
            value = JSON.parse(source);
        }
        catch {
            throw invalid('transferable', rule, 'other text');
        }
    }
    if (!isObject(value))
        throw invalid('transferable', rule, describe(value));
    if ('isHeld' in value && !('token' in value)) {
        throw invalid('transferable', rule, 'the result of lock.toJSON(), which has no owner token');
    }
    const json = fields('transferable', value, RESTORE);
    const part = (name) => {
        const found = json[name];
        if (found === undefined)
            throw invalid('transferable', rule, `no ${name}`);
        return found;
    };
    const names = [namesOf(part('names'))].flat();
    const token = text('token', part('token'));
    const fencingToken = text('fencingToken', part('fencingToken'));
    return { names, token, fencingToken, options: recordOf(requestOf(pick(json, ['ttlMs', 'renew', 'metadata']), true)) };
}
/** @internal Reads each of these properties once. */
function pick(object, names) {
    return Object.fromEntries(names.map((name) => [name, object[name]]));
}

/** @internal The key of the `Source` in a message. */
const SOURCE = Symbol('holdfast.source');
const TYPES = [
    'acquired',
    'released',
    'renewed',
    'lost',
    'waiting',
    'timeout',
    'aborted',
    'failed',
    'connected',
    'disconnected',
];
const CHANNELS = new Map(TYPES.map((type) => [type, node_diagnostics_channel.channel(`holdfast:${type}`)]));
// `any`: without `hasSubscribers` (Node before 20.13) nothing is traced.
const ACQUIRE = node_diagnostics_channel.tracingChannel('holdfast:acquire');
const USING = node_diagnostics_channel.tracingChannel('holdfast:using');
/** @internal Whether a channel of events has a subscriber. */
const isObserved = () => TYPES.some((type) => CHANNELS.get(type).hasSubscribers);
/** @internal Publishes an event to the subscribers of its channel. */
function publish(event, source) {
    const to = CHANNELS.get(event.type);
    if (!to?.hasSubscribers)
        return;
    Object.defineProperty(event, SOURCE, { value: source });
    to.publish(event);
}
/** Returns the message about a call. */
function callOf({ source, prefix }, method, names) {
    const given = Array.isArray(names) ? names : [names];
    // A name that is not text is rejected by the call.
    const list = given.filter((name) => typeof name === 'string').map((name) => prefix + name);
    return { method, names: list, engine: source.engine, run: runNow, [SOURCE]: source };
}
/** @internal Makes an acquisition, with messages if `tracing:holdfast:acquire:*` has subscribers. */
function traceAcquire(connection, method, names, acquire) {
    return ACQUIRE.hasSubscribers ? ACQUIRE.tracePromise(acquire, callOf(connection, method, names)) : acquire();
}
/** @internal Acquires a lock and calls a job, with messages if `tracing:holdfast:using:*` has subscribers. */
function traceUsing(connection, method, names, using) {
    if (!USING.hasSubscribers)
        return using(runNow);
    const call = callOf(connection, method, names());
    return USING.tracePromise(() => using((job) => call.run(job)), call);
}
const runNow = (job) => job();

/**
 * Of instances that call `oncePer` at the same time, one is granted the name: on a quorum, single attempts may all fail. A wait beyond
 * the end of the period would run the job again, so it is at most half a period.
 */
const ONCE_WAIT_MS = 1000;
/** @internal Records that a job runs. Until it has ended the process does not exit by itself: it may wait for its signal alone. */
function begin({ native, jobs }) {
    jobs.running += 1;
    if (jobs.running === 1)
        native.setRunsJobs(true);
}
/** @internal Records that a job has ended. */
function end({ native, jobs }) {
    jobs.running -= 1;
    if (jobs.running === 0)
        native.setRunsJobs(false);
}
/** Releases the lock of a job that has ended. Resolves to the JSON text of its loss, or to `null`. */
function finish(connection, lock) {
    const finished = finishLock(lock);
    end(connection);
    return finished;
}
/** @internal `using`, `tryUsing` and `oncePer`. */
function using(connection, kind, names, second, third) {
    return traceUsing(connection, kind, () => names, (run) => usingWith(connection, kind, names, second, third, run));
}
async function usingWith(connection, kind, names, second, third, run) {
    const isOnce = kind === 'oncePer';
    const wanted = isOnce ? nameOf(names) : namesOf(names);
    const isShort = typeof second === 'function' && third === undefined;
    const options = isShort ? undefined : fields('options', second, isOnce ? ONCE : ACQUIRE$1);
    const job = callback('fn', isShort ? second : third);
    const periodMs = isOnce ? positiveMs('periodMs', options?.['periodMs']) : 0;
    const request = requestOf(options, connection.renews);
    if (isOnce)
        request.more = { ...UNLIMITED, ...request.more };
    if (kind !== 'using' && Number.isNaN(request.waitMs))
        request.waitMs = Math.min(ONCE_WAIT_MS, periodMs / 2);
    let lock;
    try {
        lock = (await traceAcquire(connection, kind, wanted, () => acquire(connection, wanted, request, REJECT_BUSY)));
    }
    catch (thrown) {
        // The reason of the caller's signal may be a `LOCK_TIMEOUT` of another call.
        if (kind === 'using' || !isLockError(thrown, 'LOCK_TIMEOUT') || thrown === request.signal?.reason)
            throw thrown;
        return { ran: false, holder: thrown.holder };
    }
    begin(connection);
    let value;
    try {
        value = await run(() => job(lock));
    }
    catch (cause) {
        const loss = await finish(connection, lock);
        if (loss === null)
            throw cause;
        throw errorOf(loss, connection.prefix, { cause });
    }
    // Not before: after an error, another process may run the job at once.
    if (isOnce)
        holdAtLeast(lock, periodMs);
    const loss = await finish(connection, lock);
    if (loss !== null)
        throw errorOf(loss, connection.prefix);
    return kind === 'using' ? value : { ran: true, value };
}
/**
 * @internal `acquireAndExecute`. Not async: V8 adds the frames of the caller to an error only through promises that are awaited.
 */
function acquireAndExecute(connection, first, second, third) {
    const name = () => (isObject(first) ? first['name'] : first);
    return traceUsing(connection, 'acquireAndExecute', name, (run) => execute(connection, first, second, third, run));
}
async function execute(connection, first, second, third, run) {
    let name;
    let request;
    let fn;
    if (isObject(first)) {
        const options = fields('options', first, EXECUTE);
        name = nameOf(options['name']);
        request = requestOf(options, false);
        fn = second;
    }
    else {
        name = nameOf(first);
        request = requestOf(undefined, false);
        const isShort = third === undefined && typeof second === 'function';
        if (!isShort && second !== undefined)
            request.ttlMs = secondsOf(second);
        fn = isShort ? second : third;
    }
    const job = callback('fn', fn);
    request.renew ??= false;
    if (Number.isNaN(request.waitMs))
        request.waitMs = 0;
    const lock = await traceAcquire(connection, 'acquireAndExecute', name, () => acquire(connection, name, request, 0));
    if (lock === null)
        return undefined;
    begin(connection);
    try {
        return await run(() => job(lock));
    }
    finally {
        await finish(connection, lock);
    }
}

/** The first pause before a further campaign; each further one is twice as long. In milliseconds. */
const FIRST_PAUSE_MS$1 = 100;
const LONGEST_PAUSE_MS$1 = 30_000;
/** After a shorter leadership a pause follows, whatever ended it. */
const SHORT_MS = 1000;
/** A leadership that lasted for this long makes the next pause the first one again. */
const STEADY_MS = 60_000;
/** @internal Creates an `Election`, which begins at once. */
let createElection;
/**
 * A candidate for the leadership of a name, from `locks.elect()`. It waits in the queue of the name until it leads.
 *
 * @example
 * const election = locks.elect('scheduler', { ttlMs: '10s' }, ({ signal }) => runScheduler(signal))
 * console.log(election.isLeader, election.term)
 * await election.stop()
 */
class Election {
    static {
        createElection = (connection, name, second, third) => new Election(connection, name, second, third);
    }
    #done;
    /** Whether `done` was read. Then its reader receives the error, and no warning is emitted. */
    #isObserved = false;
    #connection;
    #name;
    #request;
    #fn;
    #options;
    /** Cancels the wait for the leadership. */
    #stopper = new AbortController();
    #term;
    #pauseMs = FIRST_PAUSE_MS$1;
    /** Whether the store fails, and its error was reported. */
    #isStoreReported = false;
    /** The ticket of the pause between two campaigns. */
    #pauseTicket;
    constructor(connection, name, second, third) {
        if (connection?.elections === undefined) {
            throw new LockError('LOCK_INVALID_ARGUMENT', 'an Election comes from elect of a LockService, not from new');
        }
        const isShort = typeof second === 'function' && third === undefined;
        const options = isShort ? undefined : fields('options', second, ELECT);
        this.#connection = connection;
        this.#name = nameOf(name);
        this.#fn = callback('fn', isShort ? second : third);
        this.#options = {
            restart: options?.['restart'] === undefined ? false : flag('restart', options['restart']),
            unref: options?.['unref'] === undefined ? false : flag('unref', options['unref']),
            onError: options?.['onError'] === undefined ? undefined : callback('onError', options['onError']),
            signal: options?.['signal'] === undefined ? undefined : signalOf(options['signal']),
        };
        const { ttlMs, stallLimitMs, metadata } = options ?? {};
        const request = requestOf({ ttlMs, stallLimitMs, metadata, onStoreError: 'wait', renew: true }, true);
        this.#request = {
            ...request,
            more: { ...request.more, ...UNLIMITED },
            waitMs: Infinity,
            signal: this.#stopper.signal,
        };
        this.#done = this.#run(this.#options.signal);
        // A rejection that nothing handles would end the process.
        this.#done.catch((thrown) => {
            if (!this.#isObserved)
                this.#warn('election of', 'has ended', thrown);
        });
    }
    /**
     * Resolves when the election has ended: after `stop()`, an abort of the option `signal`, or `close()` of the service, when `fn`
     * has settled and the lock is released. Rejects with `LOCK_CLOSED` if the service was closed before; without `restart`, with
     * what `fn` threw, and with a `LOCK_STORE` that is not retryable, such as a wrong password. If `done` was not read before that,
     * the error is emitted as a `HoldfastWarning` (`HOLDFAST_ELECTION`). The rejection never ends the process by itself.
     */
    get done() {
        this.#isObserved = true;
        return this.#done;
    }
    /** Whether this candidate leads now, by the native clock. `false` from `resign()`, `stop()` and a loss on. */
    get isLeader() {
        return this.#term !== undefined && !this.#term.isEnding && this.#term.lock.isHeld;
    }
    /** The fencing token of the current leadership: larger than that of every earlier leader. `null` while another one leads. */
    get term() {
        return this.isLeader ? this.#term.lock.fencingToken : null;
    }
    /**
     * Ends the current leadership: aborts its `signal`, waits until `fn` has settled, and releases the lock. Then this candidate
     * waits at the end of the queue. On a store without a queue it may lead again at once. Without a leadership it has no effect. Do not
     * await it in `fn`, which it waits for.
     *
     * @example
     * const election = locks.elect('scheduler', ({ signal }) => runScheduler(signal))
     * await election.resign()
     * await election.stop()
     */
    async resign() {
        await this.#end('the leader resigned');
    }
    /**
     * Ends the election: like {@link resign}, but does not lead again. Resolves when `fn` has settled and the lock is released, and
     * never rejects: {@link done} does. Do not await it in `fn`.
     *
     * @example
     * const election = locks.elect('scheduler', ({ signal }) => runScheduler(signal))
     * process.once('SIGTERM', () => election.stop())
     * await election.stop()
     */
    async stop() {
        this.#stopper.abort();
        if (this.#pauseTicket !== undefined)
            native.cancel(this.#pauseTicket);
        await this.#end('the election was stopped');
        await this.#done.catch(() => { });
    }
    /**
     * Ends the election like {@link stop}.
     *
     * @example
     * await using election = locks.elect('scheduler', ({ signal }) => runScheduler(signal))
     */
    async [Symbol.asyncDispose]() {
        await this.stop();
    }
    async #end(why) {
        const term = this.#term;
        if (term === undefined)
            return;
        if (!term.isEnding) {
            term.isEnding = true;
            abortSignal(term.lock, new DOMException(why, 'AbortError'));
        }
        await term.ended;
    }
    async #run(signal) {
        const { elections } = this.#connection;
        const stop = () => void this.stop();
        elections.add(this);
        if (!this.#options.unref)
            begin(this.#connection);
        try {
            signal?.addEventListener('abort', stop);
            if (signal?.aborted)
                stop();
            for (let lock = await this.#campaign(); lock !== null; lock = await this.#campaign())
                await this.#lead(lock);
        }
        finally {
            signal?.removeEventListener('abort', stop);
            if (!this.#options.unref)
                end(this.#connection);
            elections.delete(this);
        }
    }
    /** Waits for the leadership. Resolves to `null` when the election has ended. */
    async #campaign() {
        while (!this.#stopper.signal.aborted) {
            try {
                const flags = this.#options.unref ? IN_BACKGROUND : 0;
                const lock = await acquire(this.#connection, this.#name, this.#request, flags);
                this.#isStoreReported = false;
                return lock;
            }
            catch (thrown) {
                if (this.#stopper.signal.aborted)
                    return null;
                if (!isLockError(thrown, 'LOCK_STORE'))
                    throw thrown;
                // A retryable one: for example, the grant arrived after the end of its lease.
                if (!thrown.retryable && !this.#isStoreReported) {
                    await this.#report('candidate for', thrown);
                    this.#isStoreReported = true;
                }
                await this.#pause();
            }
        }
        return null;
    }
    /** Calls `fn` with a leadership, until it has settled, and releases the lock. Throws what `fn` threw. */
    async #lead(lock) {
        let ended;
        const term = { lock, ended: new Promise((resolve) => (ended = resolve)), isEnding: false };
        this.#term = term;
        // A stop during the grant.
        if (this.#stopper.signal.aborted)
            void this.#end('the election was stopped');
        const ticket = newTicket();
        const lasting = native.pause(STEADY_MS, ticket, true);
        let failure;
        try {
            await this.#fn(leadershipOf(this, lock));
        }
        catch (thrown) {
            failure = { thrown };
        }
        const { signal } = lock;
        const hasEndedItself = !signal.aborted;
        await finishLock(lock);
        this.#term = undefined;
        native.cancel(ticket);
        ended();
        if (failure && !isCausedBy(failure.thrown, signal))
            await this.#report('leader of', failure.thrown);
        const lastedMs = await lasting;
        if (lastedMs >= STEADY_MS)
            this.#pauseMs = FIRST_PAUSE_MS$1;
        if (hasEndedItself || lastedMs < SHORT_MS)
            await this.#pause();
    }
    /** Handles an error of `fn` or of the store. Throws it unless `restart` is set. */
    async #report(who, thrown) {
        const { restart, onError } = this.#options;
        if (!restart)
            throw thrown;
        if (onError)
            return await onError(thrown);
        this.#warn(who, this.#stopper.signal.aborted ? 'failed' : 'failed, and is a candidate again', thrown);
    }
    #warn(who, what, thrown) {
        warn('HOLDFAST_ELECTION', `the ${who} ${JSON.stringify(this.#name)} ${what}: ${stackOf(thrown)}`);
    }
    /** Waits before the next campaign, so that an `fn` that ends at once causes no load. The random part keeps processes apart. */
    async #pause() {
        if (this.#stopper.signal.aborted)
            return;
        const ms = this.#pauseMs * (0.75 + Math.random() / 2);
        this.#pauseMs = Math.min(2 * this.#pauseMs, LONGEST_PAUSE_MS$1);
        const ticket = (this.#pauseTicket = newTicket());
        await native.pause(ms, ticket, this.#options.unref === true);
        this.#pauseTicket = undefined;
    }
}
/** Creates what `fn` gets. */
function leadershipOf(election, lock) {
    return {
        name: lock.name,
        term: lock.fencingToken,
        signal: lock.signal,
        get isLeader() {
            return election.isLeader && election.term === this.term;
        },
        get remainingMs() {
            return lock.remainingMs;
        },
    };
}
/**
 * Whether an error of `fn` is the consequence of the abort of its signal: the reason itself, as `fetch` throws it, or an `AbortError` with
 * this cause, as the functions of Node throw it. Other libraries throw an `AbortError` without a cause.
 */
function isCausedBy(thrown, signal) {
    if (!signal.aborted)
        return false;
    if (thrown === signal.reason)
        return true;
    const { name, cause } = Object(thrown);
    return name === 'AbortError' && (cause === undefined || cause === signal.reason);
}

// Validates the arguments of `LockService.connect`.
const MAX_URLS = 100;
const LOGIN = ['username', 'password', 'credentials'];
const OTHERS = 'host port database listenUrl tls keyPrefix collection table storeTimeoutMs connectMs lazy minReplicas maxConnections ' +
    'sessionTimeoutMs ' +
    'defaults onEvent';
const CONNECT = [...OTHERS.split(' '), ...LOGIN];
/** The options that are one value each, and their checks. */
const CHECKS = {
    listenUrl: (name, value) => text(name, isObject(value) && 'href' in value ? value['href'] : value),
    keyPrefix: text,
    collection: filled,
    table: filled,
    storeTimeoutMs: positiveMs,
    connectMs: (name, value) => (value === 0 ? 0 : positiveMs(name, value)),
    sessionTimeoutMs: positiveMs,
    minReplicas: (name, value) => wholeNumber(name, value, 0, 100),
    maxConnections: (name, value) => wholeNumber(name, value, 1, 100),
};
const PEM = ['ca', 'cert', 'key'];
const TLS = [...PEM, ...PEM.map((name) => `${name}File`), 'servername', 'insecure'];
/** Methods of the clients of ioredis, node-redis, MongoDB and Mongoose. Options have none of them. */
const CLIENT_METHODS = ['connect', 'sendCommand', 'disconnect'];
const EXAMPLE = 'such as redis://HOST:6379, mongodb://HOST:27017, postgres://HOST:5432/DATABASE, mysql://HOST:3306/DATABASE, etcd://HOST:2379, ' +
    'zookeeper://HOST:2181 or sqlite:PATH (or set HOLDFAST_URL)';
const OTHER_STORE = 'for a store other than Redis, MongoDB, PostgreSQL, MySQL, etcd and ZooKeeper';
const ONLY_REDIS = ': host, port and database are the form for Redis. Other stores take a URL, such as postgres://HOST:5432/DATABASE';
/** The variables of PostgreSQL's tools that have what a URL leaves out. */
const POSTGRES = 'PGHOST PGPORT PGUSER PGPASSWORD PGDATABASE PGSSLMODE PGSSLROOTCERT PGPASSFILE'.split(' ');
/** Rejects a target that is present but empty: probably a setting is missing, and the local store is not what is meant. */
function checkPresent(argument, target) {
    if (target !== undefined && target !== null && target !== '')
        return;
    const rule = 'must not be empty: probably a setting is missing. Omit it to connect to HOLDFAST_URL if that is set, and otherwise to the ' +
        'embedded store';
    throw invalid(argument, rule, describe(target));
}
/** @internal Checks the arguments of `LockService.connect`. `isPresent`: whether there are any. */
function connectionOf(target, second, isPresent) {
    let urls = target;
    let options;
    if (isObject(target) && typeof target['href'] !== 'string') {
        if (CLIENT_METHODS.some((name) => typeof target[name] === 'function')) {
            const rule = 'must be a URL or an options object, not a client: a LockService opens connections of its own; pass the URL';
            throw invalid('target', rule, 'an object with methods');
        }
        if (second !== undefined) {
            throw invalid('options', 'must be absent when the target is an options object', describe(second));
        }
        options = fields('target', target, ['url', ...CONNECT]);
        urls = options['url'];
        for (const name of ['url', 'host'])
            if (name in options)
                checkPresent(name, options[name]);
    }
    else {
        if (isPresent)
            checkPresent('target', target);
        options = fields('options', second, CONNECT) ?? {};
    }
    const tls = fields('tls', options['tls'], TLS);
    const located = separateUser(serverOf(options, urls, tls !== undefined) ?? urlsOf(urls), options);
    const { login, credentials } = loginOf({ ...options, ...located.login });
    const config = { urls: located.urls.map(login), defaults: {}, events: false };
    if (config.urls.length === 0) {
        const [name] = [...LOGIN, 'tls'].filter((name) => options[name] !== undefined);
        if (name !== undefined)
            throw invalid(name, 'must be absent without a URL or a host', 'an options object without one');
    }
    if (tls !== undefined && config.urls.some((url) => url.startsWith('sqlite:'))) {
        throw invalid('tls', `must be absent ${OTHER_STORE}`, 'a URL of sqlite:');
    }
    if (config.urls.length === 0)
        warnOfEmbedded();
    if (credentials)
        config.credentials = true;
    if (config.urls.some((url) => /^postgres(ql)?:/.test(url)))
        config.environment = environmentOfPostgres();
    for (const [name, check] of Object.entries(CHECKS)) {
        if (options[name] !== undefined)
            Object.assign(config, { [name]: check(name, options[name]) });
    }
    let value;
    for (const name of PEM) {
        const file = `${name}File`;
        if ((value = tls?.[file]) !== undefined) {
            if (/[\n\r]|-----BEGIN/.test(String(value)))
                throw invalid(`tls.${file}`, `must be a path (tls.${name} takes PEM text)`, 'PEM text');
            config[file] = text(`tls.${file}`, value);
        }
        if ((value = tls?.[name]) === undefined)
            continue;
        if (config[file] !== undefined)
            throw invalid(`tls.${name}`, `must be absent with tls.${file}`, 'both');
        config[name] = pemOf(`tls.${name}`, value);
    }
    if ((value = tls?.['servername']) !== undefined)
        config.servername = text('tls.servername', value);
    if ((value = tls?.['insecure']) !== undefined)
        config.insecure = flag('tls.insecure', value);
    const defaults = fields('defaults', options['defaults'], DEFAULTS) ?? {};
    config.defaults = recordOf(requestOf(pick(defaults, DEFAULTS), true));
    const onEvent = options['onEvent'];
    config.events = onEvent !== undefined || isObserved();
    return {
        config,
        onEvent: onEvent === undefined ? undefined : callback('onEvent', onEvent),
        credentials,
        lazy: (value = options['lazy']) !== undefined && flag('lazy', value),
    };
}
/**
 * Returns the variables of PostgreSQL that are set. Without them the password file is in the home folder, and the user is this one. A
 * password file that other users may access is left out, as PostgreSQL's tools do.
 */
function environmentOfPostgres() {
    const environment = {};
    for (const name of POSTGRES) {
        const value = process.env[name];
        if (value)
            environment[name] = value;
    }
    const isWindows = process.platform === 'win32';
    // Both functions of the system throw for a user without an entry in its list.
    try {
        const file = isWindows
            ? node_path.join(process.env['APPDATA'] ?? '', 'postgresql', 'pgpass.conf')
            : node_path.join(node_os.homedir(), '.pgpass');
        environment['PGPASSFILE'] ??= file;
        environment['PGUSER'] ??= node_os.userInfo().username;
    }
    catch {
        // The URL has to name the user, and the password.
    }
    const file = environment['PGPASSFILE'];
    if (file !== undefined && !isWindows && ((node_fs.statSync(file, { throwIfNoEntry: false })?.mode ?? 0) & 0o077) !== 0) {
        warn('HOLDFAST_STORE', `the password file ${file} is ignored: other users may access it; its permissions should be u=rw (0600)`);
        delete environment['PGPASSFILE'];
    }
    return environment;
}
let isEmbeddedWarned = false;
/** Warns, once, of the embedded store in production. */
function warnOfEmbedded() {
    if (process.env['NODE_ENV'] !== 'production' || isEmbeddedWarned)
        return;
    isEmbeddedWarned = true;
    warn('HOLDFAST_EMBEDDED_STORE', 'LockService.connect() has no target, and HOLDFAST_URL is not set: locks are in the embedded store, a file that only the ' +
        'processes of this machine and user share. Set HOLDFAST_URL or pass a URL; pass `sqlite:PATH` if this is intended.');
}
/** Checks PEM text. Returns it without the indentation that YAML adds. */
function pemOf(argument, value) {
    const pem = text(argument, value);
    const rule = 'must be PEM text with line breaks';
    if (pem.includes('\\n-----END')) {
        throw invalid(argument, `${rule}: apply .replaceAll('\\\\n', '\\n')`, 'text with escaped line breaks (\\n)');
    }
    if (/-----BEGIN [^-\n\r]*-----[^\n\r]*[^\s]/.test(pem)) {
        const quote = 'a shell needs quotes around the variable ("$CA"), YAML the block style |';
        throw invalid(argument, `${rule}: ${quote}`, 'text without a line break after -----BEGIN');
    }
    return pem.replace(/^[\t ]+|[\t ]+$/gm, '');
}
/** Checks a text that must not be empty. */
function filled(argument, value) {
    if (value === '')
        throw invalid(argument, 'must not be empty', '""');
    return text(argument, value);
}
/** Checks a whole number. `note` is appended to the rule in the error message. */
function wholeNumber(argument, value, from, to, note = '') {
    if (Number.isInteger(value) && value >= from && value <= to)
        return value;
    throw invalid(argument, `must be a whole number from ${from} to ${to}${note}`, describe(value));
}
/** Returns the URL of `host`, `port` and `database`. `undefined`: the options have no host. */
function serverOf(options, urls, secure) {
    const { host, port, database } = options;
    if (host === undefined) {
        const [name] = ['port', 'database'].filter((name) => options[name] !== undefined);
        if (name === undefined)
            return undefined;
        throw invalid(name, 'must be a part of the URL, or be set together with host', describe(options[name]));
    }
    if (urls !== undefined)
        throw invalid('host', 'must be absent with a URL', 'both');
    const name = text('host', host);
    if (!/^[^\s/@?#%,[\]]+$/.test(name) || /^[^:]*:[^:]*$/.test(name)) {
        throw invalid('host', 'must be a host name or an IP address, without scheme and port', 'other text');
    }
    const address = name.includes(':') ? `[${name}]` : name;
    const number = port === undefined ? 6379 : wholeNumber('port', port, 1, 65_535);
    const path = database === undefined ? 0 : wholeNumber('database', database, 0, 999_999_999, ONLY_REDIS);
    return [`redis${secure ? 's' : ''}://${address}:${number}/${path}`];
}
/**
 * Moves the user of the URLs into `login`, if all URLs have the same user and no password, and the options have a password and no user
 * name. Otherwise returns the URLs unchanged.
 */
function separateUser(urls, options) {
    if (options['password'] === undefined || options['username'] !== undefined)
        return { urls };
    const parts = urls.map((url) => /^([\w+]+:\/\/)([^:/?#@]+)@([^@]*)$/.exec(url));
    const [user] = parts.map((part) => part?.[2]);
    if (user === undefined || parts.some((part) => part?.[2] !== user))
        return { urls };
    return { urls: parts.map((part) => part[1] + part[3]), login: { username: decoded(user) } };
}
/** Returns a part of a URL without its percent-encoding. An invalid one stays unchanged. */
function decoded(part) {
    try {
        return decodeURIComponent(part);
    }
    catch {
        return part;
    }
}
/** Returns a function that adds the login of the options to a URL, or the function that provides it for each connection. */
function loginOf(options) {
    const { username, password, credentials } = options;
    const user = username === undefined ? undefined : text('username', username);
    const names = LOGIN.filter((name) => options[name] !== undefined);
    if (credentials !== undefined) {
        if (typeof credentials !== 'function')
            throw invalid('credentials', 'must be a function', kindOf(credentials));
        if (names.length > 1)
            throw invalid('credentials', `must be absent with ${names[0]}`, 'both');
        const source = { option: 'credentials', ask: credentials };
        return { login: withoutLogin('credentials'), credentials: source };
    }
    if (typeof password === 'function') {
        const ask = async () => {
            const returned = await password();
            if (typeof returned !== 'string')
                throw invalid('password', 'must return a string', kindOf(returned));
            return { username: user, password: returned };
        };
        const check = withoutLogin('password');
        const login = (url) => {
            if (!/^(mongodb|mysql|mariadb|etcd|zookeeper)/.test(url))
                return check(url);
            const rule = 'must be a string for MongoDB, MySQL, etcd and ZooKeeper: a function is for Redis and PostgreSQL';
            throw invalid('password', rule, 'a function');
        };
        return { login, credentials: { option: 'password', ask } };
    }
    if (password !== undefined && typeof password !== 'string') {
        throw invalid('password', 'must be a string, or a function that returns one', kindOf(password));
    }
    if (names.length === 0)
        return { login: (url) => url, credentials: undefined };
    const secret = password === undefined ? undefined : text('password', password);
    const check = withoutLogin(names[0]);
    const login = (url) => {
        check(url);
        if (isSocket(url)) {
            const parts = [user && `user=${encodeURIComponent(user)}`, secret && `pass=${encodeURIComponent(secret)}`];
            return `${url}${url.includes('?') ? '&' : '?'}${parts.filter(Boolean).join('&')}`;
        }
        const part = secret === undefined ? '' : `:${encodeURIComponent(secret)}`;
        return url.replace('://', () => `://${encodeURIComponent(user ?? '')}${part}@`);
    };
    return { login, credentials: undefined };
}
const isSocket = (url) => /^(redis|valkey)(\+unix:|:\/\/\/)/.test(url);
/** Returns a function that checks that a URL has no login, and is not one of a store without logins. */
function withoutLogin(argument) {
    return (url) => {
        const [store] = /^(sqlite|memory):/.exec(url) ?? [];
        if (store !== undefined)
            throw invalid(argument, `must be absent ${OTHER_STORE}`, `a URL of ${store}`);
        if (/@|[?&](user|pass|password)=/.test(url.split('://', 2)[1] ?? ''))
            throw invalid(argument, 'must be absent with a login in the URL', 'both');
        return url;
    };
}
/** Returns the URLs of a target. Without a target: the URL in the environment, if it is set. */
function urlsOf(target) {
    if (target === undefined) {
        const url = process.env['HOLDFAST_URL'];
        if (url === '')
            throw invalid('HOLDFAST_URL', 'must not be empty: set it to the URL of the store, or unset it', '""');
        return url === undefined ? [] : [urlOf(url)];
    }
    if (typeof target === 'string' || isObject(target))
        return [urlOf(target)];
    if (!Array.isArray(target)) {
        throw invalid('target', 'must be a URL, a list of URLs, or an options object', describe(target));
    }
    if (target.length > MAX_URLS)
        throw invalid('target', `must be at most ${MAX_URLS} URLs`, `${target.length} URLs`);
    if (target.length === 0)
        throw invalid('target', 'must not be an empty list', '[]');
    return Array.from({ length: target.length }, (_, index) => urlOf(target[index]));
}
/** Checks that a value is a URL as text or as an object. The native core parses it. */
function urlOf(value) {
    const url = text('target', isObject(value) ? value['href'] : value);
    if (url === '')
        throw invalid('target', `must be a URL ${EXAMPLE}`, '""');
    return url;
}
/** @internal Returns the login of a new connection as the answer to a question: a user name or `null`, and a password. */
async function askForLogin({ option, ask }) {
    try {
        const login = await ask();
        const rule = 'must return { username?, password }';
        if (!isObject(login))
            throw invalid('credentials', rule, kindOf(login));
        const { username, password, ...others } = login;
        for (const key in others)
            throw invalid('credentials', rule, `an object with the unknown key ${describe(key)}`);
        if (typeof password !== 'string' || !(username == null || typeof username === 'string'))
            throw invalid('credentials', `${rule} with strings`, 'an object');
        return [username || null, password];
    }
    catch (thrown) {
        throw new Error(`the function of ${option} failed: ${reasonOf(thrown)}`);
    }
}
/** Returns what a value is. It may be a secret: no part of it is shown. */
const kindOf = (value) => (value === null ? 'null' : `a value of type ${typeof value}`);
/** @internal Returns the message of what was thrown. */
function reasonOf(thrown) {
    try {
        return typeof thrown?.message === 'string' ? thrown.message.toWellFormed() : describe(thrown);
    }
    catch {
        return 'with a value that cannot be shown';
    }
}

// Answers the questions of the native core: the login of a new connection, and the DNS records of a name.
/** The longest time that one request of a resolver may take. */
const LONGEST_MS = 60_000;
/** @internal Answers a question of the native core: about a name, or for a login. */
function answer(question, name, credentials) {
    const answered = name ? recordsOf(...name) : askForLogin(credentials);
    answered.then((value) => native.answer(question, JSON.stringify(value), ''), (thrown) => native.answer(question, undefined, reasonOf(thrown)));
}
/** Returns host and port of each SRV record of a service, and the TXT records of the name. */
async function recordsOf(service, name, limitMs) {
    const servers = dns.getServers();
    // Each server is asked twice, the second time for twice as long; Node notices the end of a request up to its duration later. So the
    // lookup, which keeps the process alive, ends within the limit.
    const timeout = Math.min(Math.ceil(limitMs / (5 * Math.max(servers.length, 1))), LONGEST_MS);
    const resolver = new dns.promises.Resolver({ timeout, tries: 2 });
    if (`${servers}` !== `${resolver.getServers()}`)
        resolver.setServers(servers);
    try {
        const [hosts, texts] = await Promise.all([
            resolver.resolveSrv(`_${service}._tcp.${name}`).catch(none),
            resolver.resolveTxt(name).catch(none),
        ]);
        return [hosts.map((host) => [host.name, host.port]), texts.map((parts) => parts.join(''))];
    }
    catch (thrown) {
        throw new Error(`the lookup in the DNS failed (${reasonOf(thrown)})`);
    }
    finally {
        // The other lookup, if one has failed.
        resolver.cancel();
    }
}
/** Returns no record where the DNS says that there is none. */
function none(error) {
    if (error.code === 'ENODATA' || error.code === 'ENOTFOUND')
        return [];
    throw error;
}

/**
 * @internal Creates the function that receives the messages of one service. It has no reference to the service. It calls the user's
 * functions in the asynchronous context of `connect`, not in that of the call that made the native core start.
 */
function receiver({ onEvent, credentials }, source) {
    const context = new node_async_hooks.AsyncResource('HOLDFAST');
    return (batch) => context.runInAsyncScope(() => {
        for (const message of JSON.parse(batch)) {
            if (message.lost !== undefined)
                reportLoss(message.lost, message.error);
            else if (message.question !== undefined)
                answer(message.question, message.records, credentials);
            else if (message.warning !== undefined)
                warn('HOLDFAST_STORE', message.warning);
            else
                deliver(onEvent, message, source);
        }
    });
}
/** Publishes an event, and calls `onEvent`. What that throws or rejects with becomes a warning. */
function deliver(onEvent, { type, names, fencingToken, ...parts }, source) {
    const event = { type, engine: source.engine };
    if (names)
        Object.assign(event, { name: names[0], names });
    if (typeof fencingToken === 'string')
        event.fencingToken = BigInt(fencingToken);
    for (const [part, value] of Object.entries(parts))
        if (value !== null)
            event[part] = value;
    const lockEvent = withTokenAsText(event);
    publish(lockEvent, source);
    if (!onEvent)
        return;
    try {
        const returned = onEvent(lockEvent);
        if (typeof returned === 'object' && typeof returned?.then === 'function')
            Promise.resolve(returned).catch(warnOf);
    }
    catch (thrown) {
        warnOf(thrown);
    }
}
function warnOf(thrown) {
    warn('HOLDFAST_EVENT', `onEvent failed: ${stackOf(thrown)}`);
}

/** Counters of a service that is not connected yet. */
const UNCONNECTED = { held: 0, waiting: 0, acquired: 0, busy: 0, released: 0, renewed: 0, lost: 0, storeErrors: 0 };
/** The rejection of a call to a closed service, as the native core makes it. */
const CLOSED = JSON.stringify({
    code: 'LOCK_CLOSED',
    message: 'this LockService is closed',
    retryable: false,
    cause: null,
});
const DEFAULT_WAIT_MS = 10_000;
/** The pause before the second attempt to connect, in milliseconds. Each later pause is twice as long. */
const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 1000;
/** The upper limit of the measured time of one attempt to connect, in milliseconds. */
const LONGEST_ATTEMPT_MS = 2 ** 31;
/** Whether a later attempt to connect may succeed. */
const isRetryable = (thrown) => typeof thrown === 'string' && JSON.parse(thrown).retryable === true;
/**
 * @internal Returns a service that connects at its first call. A call rejects with the error of the attempt to connect; the next
 * call tries again. A call with `onStoreError: 'wait'` tries again itself for its `waitMs`.
 *
 * @param connect connects, until `native.cancel` with the ticket
 * @param defaults the defaults of the service for `acquire`
 */
function lazily(connect, defaults) {
    let service;
    let connecting;
    let isClosed = false;
    let runsJobs = false;
    let isObserved = false;
    const connectTicket = newTicket();
    // They end the calls that wait for the connection.
    const ends = new Set();
    function open() {
        return (connecting ??= connect(connectTicket).then((opened) => {
            if (runsJobs)
                opened.setRunsJobs(true);
            if (isObserved)
                opened.setEvents(true);
            return (service = opened);
        }, (thrown) => {
            connecting = undefined;
            throw thrown;
        }));
    }
    async function close() {
        isClosed = true;
        native.cancel(connectTicket);
        connecting?.then((opened) => opened.close(0)).catch(() => { });
        for (const end of ends)
            end('closed');
    }
    async function call(name, args) {
        if (isClosed)
            throw CLOSED;
        let how;
        let wake = () => { };
        // A new promise for each wait: one for the whole call would collect the reactions of all attempts.
        const ended = () => new Promise((resolve) => (wake = resolve));
        const end = (reason) => {
            how = reason;
            wake();
        };
        const { ticket, limitMs, isInBackground } = waitOf(name, args);
        let leftMs = limitMs;
        ends.add(end);
        if (ticket !== undefined)
            unstarted.set(ticket, () => end('cancelled'));
        try {
            for (let pauseMs = FIRST_PAUSE_MS; how === undefined; pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS)) {
                const attemptTicket = newTicket();
                const attempting = native.pause(LONGEST_ATTEMPT_MS, attemptTicket, isInBackground);
                try {
                    const opened = await Promise.race([open(), ended()]);
                    if (opened)
                        return opened[name](...args);
                }
                catch (thrown) {
                    if (limitMs === 0 || !isRetryable(thrown))
                        throw thrown;
                    native.cancel(attemptTicket);
                    leftMs -= await attempting;
                    if (leftMs <= 0)
                        throw thrown;
                }
                finally {
                    native.cancel(attemptTicket);
                }
                if (how !== undefined)
                    break;
                const pauseTicket = newTicket();
                const paused = native.pause(Math.min(pauseMs, leftMs), pauseTicket, isInBackground);
                await Promise.race([paused, ended()]);
                native.cancel(pauseTicket);
                leftMs -= await paused;
                args[2] = Math.max(1, leftMs);
            }
            if (how === 'closed')
                throw CLOSED;
            return 0;
        }
        finally {
            ends.delete(end);
            if (ticket !== undefined)
                unstarted.delete(ticket);
        }
    }
    /** Returns, from the arguments of a call, how it waits for the connection. Only `acquire` can wait or be cancelled. */
    function waitOf(name, args) {
        const more = (name === 'acquire' && args[4]) || {};
        const { ticket, waitsForStore = defaults.waitsForStore } = more;
        const waitMs = Number.isNaN(args[2]) ? (defaults.waitMs ?? DEFAULT_WAIT_MS) : args[2];
        const limitMs = name === 'acquire' && waitsForStore ? waitMs : 0;
        return { ticket, limitMs, isInBackground: (args[3] & IN_BACKGROUND) !== 0 };
    }
    return new Proxy(Object.create(native.LockService.prototype), {
        get(_, name) {
            if (service) {
                const member = service[name];
                return typeof member === 'function' ? member.bind(service) : member;
            }
            if (name === 'stats')
                return () => JSON.stringify(UNCONNECTED);
            if (name === 'engine')
                return 'not connected';
            if (name === 'close')
                return close;
            if (name === 'closeUnused')
                return async () => (await connecting?.catch(() => { }))?.closeUnused() ?? false;
            if (name === 'setEvents')
                return (observed) => (isObserved = observed);
            if (name === 'setRunsJobs')
                return (runs) => (runsJobs = runs);
            return (...args) => call(name, args);
        },
    });
}

/** Reads the list, and converts a page at a time: the event loop runs between two pages. */
async function* pages({ native, prefix }, options) {
    const of = fields('options', options, ['prefix'])?.['prefix'];
    const literal = of === undefined ? '' : text('prefix', of);
    try {
        const found = await native.list(prefix + literal);
        for (let page = await found.next(); page !== null; page = await found.next())
            yield infosOf(page, prefix);
    }
    catch (thrown) {
        throw fromNative(thrown, prefix);
    }
}
/** @internal `list`: a promise of the whole list, and an iterable, which converts a page when it is needed. */
function list(connection, options) {
    let how;
    async function collect() {
        // An iteration begins in the tick of the call.
        await undefined;
        if (how === 'iterated')
            throw invalid('the result of list', 'must be awaited or iterated', 'both');
        how = 'awaited';
        const infos = [];
        for await (const page of pages(connection, options))
            infos.push(...page);
        return infos;
    }
    const collected = collect();
    async function* fromPages() {
        for await (const page of pages(connection, options))
            yield* page;
    }
    async function* fromCollected() {
        yield* await collected;
    }
    // Not an async generator: the body of a generator runs only at the first `next()`, and `how` must be set now.
    const iterate = () => {
        collected.catch(() => { });
        if (how === 'awaited')
            return fromCollected();
        how = 'iterated';
        return fromPages();
    };
    return Object.assign(collected, { [Symbol.asyncIterator]: iterate });
}

const DEFAULT_INTERVAL_MS = 1000;
/** The shortest time between two reads of a name. */
const SHORTEST_INTERVAL_MS = 10;
/** @internal A name that this process watches: one poll for all iterations. */
class Watch {
    /** The reason of the end, of which each reader creates an error with its own frames. `undefined`: the service was closed. */
    failure;
    hasEnded = false;
    #isRunning = false;
    /** Whether a reader waits that has read nothing yet. */
    #isDue = false;
    #readers = new Set();
    #connection;
    #full;
    #ticket;
    constructor(connection, full) {
        this.#connection = connection;
        this.#full = full;
    }
    add(reader) {
        this.#readers.add(reader);
    }
    /** Reads the name while a reader waits. `atOnce`: without the rest of a pause. */
    poll(atOnce) {
        if (atOnce)
            this.#isDue = true;
        if (!this.#isRunning)
            void this.#run();
        else if (atOnce)
            this.wake();
    }
    remove(reader) {
        if (!this.#readers.delete(reader) || this.#readers.size > 0)
            return;
        this.wake();
        if (!this.#isRunning)
            this.#end();
    }
    /** Ends the pause before the next read. */
    wake() {
        if (this.#ticket !== undefined)
            native.cancel(this.#ticket);
    }
    async #run() {
        this.#isRunning = true;
        try {
            // A pause follows each read, so that a name that changes all the time is not read all the time.
            while (this.#waiting().length > 0)
                await this.#pause(await this.#read());
            this.#isRunning = false;
            if (this.#readers.size === 0)
                this.#end();
        }
        catch (thrown) {
            if (!isLockError(fromNative(thrown, ''), 'LOCK_CLOSED'))
                this.failure = { thrown };
            this.#end();
        }
    }
    #waiting() {
        return [...this.#readers].filter((reader) => reader.isWaiting);
    }
    #end() {
        const { watches } = this.#connection;
        this.hasEnded = true;
        if (watches.get(this.#full) === this)
            watches.delete(this.#full);
        for (const reader of this.#readers)
            reader.changed();
    }
    /** Reads the name. Resolves to the rest of its lease in milliseconds, if it is held. */
    async #read() {
        const { native: service, prefix } = this.#connection;
        const readers = this.#waiting();
        this.#isDue = false;
        try {
            const found = infosOf(await service.inspect(this.#full), prefix)[0] ?? null;
            for (const reader of readers)
                reader.read(found);
            return found?.remainingMs ?? Infinity;
        }
        catch (thrown) {
            const error = fromNative(thrown, prefix);
            // An outage of the store is no change.
            if (isLockError(error, 'LOCK_STORE') && error.retryable)
                return Infinity;
            throw thrown;
        }
    }
    /** Waits until the next read is due. */
    async #pause(remainingMs) {
        const intervals = Array.from(this.#readers, ({ intervalMs }) => intervalMs);
        const ms = Math.max(SHORTEST_INTERVAL_MS, Math.min(remainingMs, ...intervals));
        if (intervals.length === 0 || this.#isDue)
            return;
        this.#ticket = newTicket();
        await native.pause(ms, this.#ticket, false);
        this.#ticket = undefined;
    }
}
/** Whether two states are those of one grant. A MongoDB replica set shows the token of a new grant later. */
function isSameHolder(one, other) {
    if (one === null || other === null)
        return one === other;
    const tokens = [one.fencingToken, other.fencingToken];
    if (!tokens.includes(null))
        return tokens[0] === tokens[1];
    const parts = ({ holder }) => holder && [holder.host, holder.pid, Number(holder.since)].join();
    return parts(one) === parts(other);
}
/** @internal `watch`. */
function watch(connection, name, second) {
    const options = fields('options', second, WATCH);
    const { intervalMs = DEFAULT_INTERVAL_MS, signal } = options ?? {};
    const full = fullName(connection, nameOf(name));
    return new Iteration(connection, full, positiveMs('intervalMs', intervalMs), signal === undefined ? undefined : signalOf(signal));
}
/** One iteration of a watched name. */
class Iteration {
    #connection;
    #full;
    intervalMs;
    #signal;
    #watch;
    #hasEnded = false;
    /** The state that was read last, and the one that was returned last. */
    #latest;
    #returned;
    /** Resolves after a change. `undefined`: no call of `next` waits. */
    #change;
    changed = () => { };
    constructor(connection, full, intervalMs, signal) {
        this.#connection = connection;
        this.#full = full;
        this.intervalMs = intervalMs;
        this.#signal = signal;
    }
    [Symbol.asyncIterator]() {
        return this;
    }
    get isWaiting() {
        return this.#change !== undefined;
    }
    read(state) {
        this.#latest = state;
        if (this.#isNew())
            this.changed();
    }
    /** Whether the last state is another one than that which was returned last. */
    #isNew() {
        const [latest, returned] = [this.#latest, this.#returned];
        return latest !== undefined && (returned === undefined || !isSameHolder(returned, latest));
    }
    async next() {
        while (!this.#hasEnded) {
            if (this.#signal?.aborted) {
                this.#end();
                throw this.#signal.reason;
            }
            const watch = (this.#watch ??= this.#begin());
            if (this.#isNew())
                return { done: false, value: (this.#returned = this.#latest) };
            if (watch.hasEnded) {
                this.#end();
                if (watch.failure)
                    throw fromNative(watch.failure.thrown, this.#connection.prefix);
                break;
            }
            const change = (this.#change ??= new Promise((resolve) => {
                this.changed = () => {
                    this.#change = undefined;
                    resolve();
                };
            }));
            watch.poll(this.#latest === undefined);
            await change;
        }
        return { done: true, value: undefined };
    }
    async return() {
        this.#end();
        return { done: true, value: undefined };
    }
    /** Joins the other iterations of the name. */
    #begin() {
        const { watches } = this.#connection;
        const watch = watches.get(this.#full) ?? new Watch(this.#connection, this.#full);
        watches.set(this.#full, watch);
        this.#signal?.addEventListener('abort', this.#onAbort);
        watch.add(this);
        return watch;
    }
    #onAbort = () => this.changed();
    #end() {
        this.#hasEnded = true;
        this.#signal?.removeEventListener('abort', this.#onAbort);
        this.#watch?.remove(this);
        this.changed();
    }
}

const inspect = Symbol.for('nodejs.util.inspect.custom');
/** @internal Returns the native core of a service, for `testing.ts`. */
let nativeOf;
/** @internal Adds a receiver of the events of a service, for `otel.ts`. */
exports.observe = void 0;
/**
 * A lock service over one store. Create one per process with `LockService.connect`. Its methods may be detached:
 * `const { acquire } = locks`.
 */
class LockService {
    static {
        nativeOf = (service) => service.#connection.native;
        exports.observe = (service) => {
            const { native, source } = service.#connection;
            source.receivers += 1;
            native.setEvents(true);
            return {
                source,
                isConnected: () => native.isConnected(),
                stats: () => JSON.parse(native.stats()),
                end() {
                    source.receivers -= 1;
                    if (source.receivers === 0)
                        native.setEvents(false);
                },
            };
        };
    }
    #connection;
    static async connect(...given) {
        const request = connectionOf(given[0], given[1], given.length > 0);
        const { urls, defaults } = request.config;
        try {
            const source = { engine: '', receivers: Number(request.config.events), isClosed: false };
            const receive = receiver(request, source);
            const connect = async (ticket) => {
                const service = await native.connect({ ...request.config, ticket }, receive);
                source.engine = service.engine;
                return service;
            };
            const service = request.lazy ? lazily(connect, defaults) : await connect(newTicket());
            return new LockService(register({
                native: service,
                prefix: '',
                jobs: { running: 0 },
                elections: new Set(),
                watches: new Map(),
                renews: defaults.renew ?? true,
                connectedTo: shownUrls(urls),
                source,
            }));
        }
        catch (thrown) {
            throw fromNative(thrown, '');
        }
    }
    constructor(connection) {
        if (!(connection?.native instanceof native.LockService)) {
            const origin = 'a LockService comes from `await LockService.connect(…)`, not from new';
            throw new LockError('LOCK_INVALID_ARGUMENT', origin);
        }
        this.#connection = connection;
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
     *
     * @example
     * if (await locks.acquireLock('report', 60)) {
     *   await sendReport().finally(() => locks.releaseLock('report'))
     * }
     */
    async acquireLock(name, ttlSeconds) {
        const connection = this.#connection;
        const full = fullName(connection, nameOf(name));
        const ttlMs = ttlSeconds === undefined ? NaN : secondsOf(ttlSeconds);
        return await traceAcquire(connection, 'acquireLock', name, () => acquireByName(connection, full, ttlMs));
    }
    /**
     * The gist's `releaseLock`: releases a lock that `acquireLock` of this service acquired, and never another holder's lock.
     * @returns `true`: this call released it, with the exceptions of `Lock.release`. `false`: this service did not hold it (not
     * acquired, expired, or transferred)
     * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     *
     * @example
     * if (!(await locks.releaseLock('report'))) console.log('the lease had ended')
     */
    async releaseLock(name) {
        const full = fullName(this.#connection, nameOf(name));
        try {
            return await this.#connection.native.releaseByName(full);
        }
        catch (thrown) {
            throw fromNative(thrown, this.#connection.prefix);
        }
    }
    acquireAndExecute(first, second, third) {
        return acquireAndExecute(this.#connection, first, second, third);
    }
    /**
     * Acquires a lock on one name, or on all of up to 1000 names (etcd, ZooKeeper: 60) at the same time, and waits while a name is busy.
     * Meanwhile the names before it in sort order are busy for other calls. In a Redis Cluster these are the names of earlier slots. On
     * MongoDB and a quorum no names are reserved.
     * @throws `LOCK_TIMEOUT` when a name is still busy after `waitMs`, `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`,
     * `LOCK_INVALID_ARGUMENT`
     *
     * @example
     * const lock = await locks.acquire(['account:1', 'account:2'], { waitMs: '5s' })
     * await sendReport().finally(() => lock.release())
     */
    async acquire(names, options) {
        const wanted = namesOf(names);
        const request = requestOf(fields('options', options, ACQUIRE$1), this.#connection.renews);
        const connection = this.#connection;
        const acquired = traceAcquire(connection, 'acquire', wanted, () => acquire(connection, wanted, request, REJECT_BUSY));
        return registerLock((await acquired));
    }
    /**
     * Acquires a lock like `acquire`, but makes one attempt and does not wait.
     * @returns the lock; `null` if a name is busy
     * @throws `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     *
     * @example
     * const lock = await locks.tryAcquire('report')
     * console.log(lock ? 'acquired' : 'busy')
     * await lock?.release()
     */
    async tryAcquire(names, options) {
        const wanted = namesOf(names);
        const request = requestOf(fields('options', options, ACQUIRE$1), this.#connection.renews);
        request.waitMs = 0;
        const connection = this.#connection;
        const lock = await traceAcquire(connection, 'tryAcquire', wanted, () => acquire(connection, wanted, request, 0));
        return lock && registerLock(lock);
    }
    using(names, second, third) {
        return using(this.#connection, 'using', names, second, third);
    }
    tryUsing(names, second, third) {
        return using(this.#connection, 'tryUsing', names, second, third);
    }
    /**
     * Calls `fn` once per period, in the process that calls first: for jobs of a schedule that runs in every instance. Calls `fn` like
     * `tryUsing`, but waits for a busy name for 1 s, at most half of the period. When `fn` returns, the name stays busy for the rest of
     * `periodMs`. When it throws, the name is free at once, and a call that waits, or the next one, runs the job. When the store does not
     * answer at the end of the job, the call resolves, and the end is repeated in the background for 5 minutes, or for the ttl if that is
     * longer. Until that succeeds, the name is free after the end of the lease.
     * @returns as `tryUsing`; `holder` is the process that runs the job or ran it, or `null` where the store does not know it
     * @throws as `tryUsing`
     *
     * @example
     * await locks.oncePer('report', { periodMs: '50m' }, () => sendReport())
     */
    oncePer(name, options, fn) {
        return using(this.#connection, 'oncePer', name, options, fn);
    }
    elect(name, second, third) {
        return createElection(this.#connection, name, second, third);
    }
    /**
     * Watches the holder of a name: yields the state at first, and after each change of the holder. Reads the name once per `intervalMs`,
     * and only while `next()` waits; holders in between are not seen. Outages of the store are no change, and neither
     * is another number of waiting calls. Ends when the service is closed.
     * @throws while it is iterated: `signal.reason` after an abort, `LOCK_STORE` if it is not retryable; at the call:
     * `LOCK_INVALID_ARGUMENT`
     *
     * @example
     * for await (const leader of locks.watch('scheduler')) {
     *   console.log('leader:', leader?.holder?.host ?? 'none')
     *   if (leader === null) break
     * }
     */
    watch(name, options) {
        return watch(this.#connection, name, options);
    }
    /**
     * Transfers a lock of another process or service to this service, from its `transferable()` or the JSON text of that. The lock
     * gets a new owner token. From then on the former holder can neither extend nor release it. It finds its lock lost at its next
     * renewal or call, so transfer a lock only after its former holder has finished its work.
     * @throws `LOCK_LOST` when the lease has ended or was already transferred, `LOCK_STORE`, `LOCK_CLOSED`,
     * `LOCK_INVALID_ARGUMENT`
     *
     * @example
     * const text = JSON.stringify(lock.transferable()) // in the other process
     * const mine = await locks.restore(text)
     * await mine.release()
     */
    async restore(transferable) {
        const { names, token, fencingToken, options } = restorationOf(transferable);
        const full = names.map((name) => fullName(this.#connection, name));
        try {
            const id = await this.#connection.native.transfer(full, token, fencingToken, options);
            return registerLock(createLock(id, names, this.#connection.prefix));
        }
        catch (thrown) {
            throw fromNative(thrown, this.#connection.prefix);
        }
    }
    /**
     * Reads the holder of a name.
     * @returns the state of the lock; `null` if the name is free
     * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     *
     * @example
     * const info = await locks.inspect('order:42')
     * console.log(info ? `held by process ${info.holder?.pid}` : 'free')
     */
    async inspect(name) {
        const full = fullName(this.#connection, nameOf(name));
        try {
            return infosOf(await this.#connection.native.inspect(full), this.#connection.prefix)[0] ?? null;
        }
        catch (thrown) {
            throw fromNative(thrown, this.#connection.prefix);
        }
    }
    /**
     * Lists the held locks whose name starts with `prefix`: literal text, not a pattern. Each page has `storeTimeoutMs`. The event
     * loop runs between pages.
     * @returns the locks, sorted by the bytes of their names. Await the result for an array, or iterate over it with `for await`
     * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     *
     * @example
     * const orders = await locks.list({ prefix: 'order:' })
     * for await (const { name, remainingMs } of locks.list()) console.log(name, remainingMs)
     */
    list(options) {
        return list(this.#connection, options);
    }
    /**
     * Releases a name, no matter which owner holds it. The holder loses the lock at its next renewal.
     * @returns `true`: the name was held and is free now. `false`: it was free
     * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
     *
     * @example
     * console.log((await locks.forceRelease('order:42')) ? 'released' : 'it was free')
     */
    async forceRelease(name) {
        const full = fullName(this.#connection, nameOf(name));
        try {
            return await this.#connection.native.forceRelease(full);
        }
        catch (thrown) {
            throw fromNative(thrown, this.#connection.prefix);
        }
    }
    /**
     * Makes one round trip to the store, for a health check.
     * @returns its duration in milliseconds
     * @throws `LOCK_STORE` when the store does not answer within `storeTimeoutMs`, `LOCK_CLOSED`
     *
     * @example
     * console.log(`the store answers in ${await locks.ping()} ms`)
     */
    async ping() {
        try {
            return await this.#connection.native.ping();
        }
        catch (thrown) {
            throw fromNative(thrown, '');
        }
    }
    /**
     * Returns a view of this service: a `LockService` on the same connections whose names begin with `prefix` in the store, after
     * `keyPrefix`. Results and errors of the view have the names without it; a name and the prefix have at most 512 bytes together.
     * `onEvent` receives the whole names. Counters are those of the service, and `close()` closes the service.
     *
     * @example
     * const billing = locks.withPrefix('billing:')
     * await billing.using('invoice:7', sendInvoice) // the lock "billing:invoice:7"
     *
     * @throws `LOCK_INVALID_ARGUMENT`
     */
    withPrefix(prefix) {
        return new LockService({ ...this.#connection, prefix: this.#connection.prefix + text('prefix', prefix) });
    }
    /**
     * Returns the counters of this service.
     *
     * @example
     * console.log(locks.stats().waiting)
     */
    stats() {
        return JSON.parse(this.#connection.native.stats());
    }
    /**
     * Releases the held locks, ends waits with `LOCK_CLOSED`, and closes the connections. A lock that was held is lost to its
     * holder: its `signal` aborts with `LOCK_LOST`, and `using` rejects with it. The abort comes before the release in the store,
     * and before the promise resolves. Later calls reject with `LOCK_CLOSED`. Takes at most `storeTimeoutMs`, or up to 1 s longer
     * when the store does not answer or the event loop is blocked. May be called again.
     *
     * With `drainMs`, jobs end first: new calls reject with `LOCK_CLOSED` and waits end at once, but the locks that are held are
     * renewed, and can be extended and released, until all of them and all jobs under `using` have ended, or `drainMs` has passed.
     * A job that has lost its lock counts as well. `close()` without `drainMs` ends a drain.
     *
     * A service that is garbage collected without a close is closed as soon as it has no lock, call, job, view, election or watch;
     * the first such close emits a `HoldfastWarning` (`HOLDFAST_NOT_CLOSED`).
     * @param options `drainMs`: 0 to 2147483648 ms, or text with a unit. Default: 0
     * @throws `LOCK_INVALID_ARGUMENT`
     *
     * @example
     * process.once('SIGTERM', () => locks.close({ drainMs: '20s' }))
     */
    async close(options) {
        const drainMs = fields('options', options, ['drainMs'])?.['drainMs'];
        const limit = drainMs === undefined ? 0 : spanMs('drainMs', drainMs);
        const { elections, watches } = this.#connection;
        unregister(this.#connection);
        for (const election of elections)
            void election.stop();
        try {
            const closing = this.#connection.native.close(limit);
            this.#connection.source.isClosed = true;
            for (const watch of watches.values())
                watch.wake();
            await closing;
        }
        catch (thrown) {
            throw fromNative(thrown, '');
        }
    }
    /**
     * Closes the service like `close()`.
     *
     * @example
     * await using locks = await LockService.connect('memory:')
     */
    async [Symbol.asyncDispose]() {
        await this.close();
    }
    /** @internal Returns what `console.log` shows. */
    [inspect]() {
        const { held, waiting } = this.stats();
        const { connectedTo, prefix } = this.#connection;
        return prefix === '' ? { connectedTo, held, waiting } : { connectedTo, prefix, held, waiting };
    }
}

const OPTIONS = ['defaults', 'onEvent', 'storeTimeoutMs'];
/**
 * Creates an isolated store in memory for one test, and a lock service on it.
 *
 * @example
 * const { locks, lose, close } = await createTestLocks()
 * const lock = await locks.acquire('report')
 * await lose('report')
 * assert.equal(lock.signal.aborted, true)
 * await close()
 *
 * @throws `LOCK_INVALID_ARGUMENT`
 */
async function createTestLocks(options) {
    // Loaded here: an application that imports `holdfast` does not need it.
    const { randomUUID } = require('node:crypto');
    const url = `memory:${randomUUID()}`;
    const services = [];
    const natives = () => services.map(nativeOf);
    async function connect(options) {
        fields('options', options, OPTIONS);
        const service = await LockService.connect(url, options);
        services.push(service);
        return service;
    }
    async function lose(name) {
        nameOf(name);
        let wasHeld;
        try {
            wasHeld = await native.lose(natives(), name);
        }
        catch (thrown) {
            throw fromNative(thrown, '');
        }
        if (!wasHeld)
            throw invalid('name', 'must be held', `the free name ${JSON.stringify(name)}`);
    }
    async function advance(duration) {
        const ms = positiveMs('duration', duration);
        try {
            await native.advance(natives(), ms);
        }
        catch (thrown) {
            throw fromNative(thrown, '');
        }
    }
    async function close() {
        await Promise.all(services.map((service) => service.close()));
    }
    return { locks: await connect(options), connect, lose, advance, close, [Symbol.asyncDispose]: close };
}

exports.Election = Election;
exports.Lock = Lock;
exports.LockError = LockError;
exports.LockService = LockService;
exports.SOURCE = SOURCE;
exports.callback = callback;
exports.createTestLocks = createTestLocks;
exports.describe = describe;
exports.fields = fields;
exports.isLockError = isLockError;
exports.native = native;
exports.shownUrls = shownUrls;
exports.stackOf = stackOf;
exports.warn = warn;
