"use strict";
Object.defineProperty(exports, "__esModule", { value: true });
exports.nameOf = exports.EXECUTE = exports.ACQUIRE = void 0;
exports.fields = fields;
exports.text = text;
exports.namesOf = namesOf;
exports.callback = callback;
exports.positiveMs = positiveMs;
exports.secondsOf = secondsOf;
exports.requestOf = requestOf;
exports.restorationOf = restorationOf;
exports.connectionOf = connectionOf;
const errors_js_1 = require("./errors.js");
const MAX_MS = 2 ** 31;
const MAX_METADATA_BYTES = 16 * 1024;
const MAX_NAMES = 1000;
const MAX_URLS = 100;
const MAX_REPLICAS = 100;
/** @internal The options of `acquire`, `tryAcquire` and `using`. */
exports.ACQUIRE = ['ttlMs', 'waitMs', 'renew', 'signal', 'maxHoldMs', 'stallLimitMs', 'minHoldMs', 'metadata'];
/** @internal The object form of `acquireAndExecute`. */
exports.EXECUTE = ['name', 'ttlSeconds', 'waitMs', 'renew', 'minHoldMs', 'signal'];
const DEFAULTS = ['ttlMs', 'waitMs', 'renew', 'maxHoldMs', 'stallLimitMs', 'minHoldMs'];
const RESTORE = ['names', 'token', 'fencingToken', 'ttlMs', 'renew', 'metadata'];
const CONNECT = ['keyPrefix', 'collection', 'table', 'storeTimeoutMs', 'minReplicas', 'defaults', 'tls', 'onEvent'];
const TLS = ['caFile', 'certFile', 'keyFile', 'insecure'];
/** Options of other libraries, in lower case, and their names here. */
const ALIASES = { timeout: 'waitMs', duration: 'ttlMs', expiry: 'ttlMs' };
const UNITS = { ms: 1, s: 1000, m: 60_000, h: 3_600_000 };
const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);
/**
 * @internal Checks an object of options. Rejects a promise that was not awaited and a `Map`, which have no options of their
 * own, and unknown options, which may be misspelt.
 */
function fields(argument, value, known) {
    if (value === undefined)
        return undefined;
    if (!isObject(value) || Object.prototype.toString.call(value) !== '[object Object]') {
        throw (0, errors_js_1.invalid)(argument, 'must be a plain object', (0, errors_js_1.describe)(value));
    }
    for (const key of Object.keys(value)) {
        if (known.includes(key))
            continue;
        const lower = key.toLowerCase();
        const meant = known.find((name) => key && name.toLowerCase().startsWith(lower)) ?? ALIASES[lower];
        const suggestion = meant !== undefined && known.includes(meant) ? ` (did you mean ${meant}?)` : '';
        throw (0, errors_js_1.invalid)(argument, `may have ${known.join(', ')}${suggestion}`, JSON.stringify(key.toWellFormed()));
    }
    return value;
}
/** @internal Checks a string. */
function text(argument, value) {
    if (typeof value !== 'string')
        throw (0, errors_js_1.invalid)(argument, 'must be a string', (0, errors_js_1.describe)(value));
    // UTF-8 has no lone surrogates: different names would become the same one.
    if (!value.isWellFormed()) {
        throw (0, errors_js_1.invalid)(argument, 'must be well-formed Unicode (it has a lone surrogate)', (0, errors_js_1.describe)(value));
    }
    return value;
}
/** @internal Checks the name of a lock. The native core checks its length. */
const nameOf = (value) => text('name', value);
exports.nameOf = nameOf;
/** @internal Checks a name, or an array of names, which it copies. */
function namesOf(value) {
    if (typeof value === 'string')
        return (0, exports.nameOf)(value);
    if (!Array.isArray(value))
        throw (0, errors_js_1.invalid)('names', 'must be a string or an array of strings', (0, errors_js_1.describe)(value));
    if (value.length === 0)
        throw (0, errors_js_1.invalid)('names', 'must not be empty', '[]');
    if (value.length > MAX_NAMES)
        throw (0, errors_js_1.invalid)('names', `must be at most ${MAX_NAMES} names`, String(value.length));
    return Array.from({ length: value.length }, (_, index) => (0, exports.nameOf)(value[index]));
}
/** @internal Checks a function. */
function callback(argument, value) {
    if (typeof value !== 'function')
        throw (0, errors_js_1.invalid)(argument, 'must be a function', (0, errors_js_1.describe)(value));
    return value;
}
/** Converts a number, or text with a unit such as `'30s'`, to milliseconds. Other values give `NaN`. */
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
    throw (0, errors_js_1.invalid)(argument, 'must be a number of milliseconds, more than 0 and at most 2147483648', (0, errors_js_1.describe)(value));
}
/** @internal Checks the `ttlSeconds` of the gist's functions. Returns milliseconds. */
function secondsOf(value) {
    const ms = typeof value === 'number' ? value * 1000 : NaN;
    if (ms > 0 && ms <= MAX_MS)
        return ms;
    throw (0, errors_js_1.invalid)('ttlSeconds', 'must be a number of seconds, more than 0 and at most 2147483.648', (0, errors_js_1.describe)(value));
}
function flag(argument, value) {
    if (typeof value !== 'boolean')
        throw (0, errors_js_1.invalid)(argument, 'must be true or false', (0, errors_js_1.describe)(value));
    return value;
}
function metadataOf(value) {
    const rule = 'must be a value that JSON can carry';
    let json;
    try {
        json = JSON.stringify(value);
    }
    catch (cause) {
        // A circular object or a bigint, or the value's own `toJSON` threw.
        const { message } = (0, errors_js_1.invalid)('metadata', rule, (0, errors_js_1.describe)(value));
        throw new errors_js_1.LockError('LOCK_INVALID_ARGUMENT', message, { cause });
    }
    // A function or a symbol has no JSON.
    if (typeof json !== 'string')
        throw (0, errors_js_1.invalid)('metadata', rule, (0, errors_js_1.describe)(value));
    const bytes = Buffer.byteLength(json);
    if (bytes > MAX_METADATA_BYTES) {
        throw (0, errors_js_1.invalid)('metadata', `must be at most ${MAX_METADATA_BYTES} bytes of JSON`, `${bytes} bytes`);
    }
    return json;
}
/** Checks an `AbortSignal` by its members: signals of other realms and polyfills are accepted. */
function signalOf(value) {
    if (isObject(value)) {
        const { aborted, addEventListener, removeEventListener } = value;
        const areFunctions = typeof addEventListener === 'function' && typeof removeEventListener === 'function';
        if (typeof aborted === 'boolean' && areFunctions)
            return value;
    }
    throw (0, errors_js_1.invalid)('signal', 'must be an AbortSignal', (0, errors_js_1.describe)(value));
}
/** @internal Checks the options of an acquisition. */
function requestOf(options) {
    const request = { ttlMs: NaN, waitMs: NaN, renew: undefined, more: undefined, signal: undefined };
    if (options === undefined)
        return request;
    let value;
    if ((value = options['ttlMs']) !== undefined)
        request.ttlMs = positiveMs('ttlMs', value);
    if ((value = options['ttlSeconds']) !== undefined)
        request.ttlMs = secondsOf(value);
    if ((value = options['waitMs']) !== undefined) {
        request.waitMs = milliseconds(value);
        if (!(request.waitMs >= 0)) {
            throw (0, errors_js_1.invalid)('waitMs', 'must be a number of milliseconds, 0 or more, or Infinity', (0, errors_js_1.describe)(value));
        }
    }
    if ((value = options['renew']) !== undefined)
        request.renew = flag('renew', value);
    const more = {};
    if ((value = options['maxHoldMs']) !== undefined)
        more.maxHoldMs = positiveMs('maxHoldMs', value);
    if ((value = options['stallLimitMs']) !== undefined)
        more.stallLimitMs = positiveMs('stallLimitMs', value);
    if ((value = options['minHoldMs']) !== undefined) {
        const ms = milliseconds(value);
        if (!(ms >= 0 && ms <= MAX_MS)) {
            throw (0, errors_js_1.invalid)('minHoldMs', 'must be a number of milliseconds from 0 to 2147483648', (0, errors_js_1.describe)(value));
        }
        more.minHoldMs = ms;
    }
    if ((value = options['metadata']) !== undefined && value !== null)
        more.metadata = metadataOf(value);
    for (const _ in more)
        request.more = more;
    if ((value = options['signal']) !== undefined)
        request.signal = signalOf(value);
    return request;
}
/** Returns a request as one record. */
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
/** @internal Checks the result of `Lock.toJSON()`, or its text. Returns its parts. */
function restorationOf(argument) {
    const rule = 'must be the result of Lock.toJSON()';
    let value = argument;
    if (typeof argument === 'string') {
        const source = text('json', argument);
        try {
            value = JSON.parse(source);
        }
        catch {
            throw (0, errors_js_1.invalid)('json', rule, 'other text');
        }
    }
    if (!isObject(value))
        throw (0, errors_js_1.invalid)('json', rule, (0, errors_js_1.describe)(value));
    const json = fields('json', value, RESTORE);
    const part = (name) => {
        const found = json[name];
        if (found === undefined)
            throw (0, errors_js_1.invalid)('json', rule, `no ${name}`);
        return found;
    };
    const names = [namesOf(part('names'))].flat();
    const token = text('token', part('token'));
    const fencingToken = text('fencingToken', part('fencingToken'));
    return { names, token, fencingToken, options: recordOf(requestOf({ ...pick(json, ['ttlMs', 'renew', 'metadata']) })) };
}
/** Reads each of these properties once. */
function pick(object, names) {
    return Object.fromEntries(names.map((name) => [name, object[name]]));
}
/** @internal Checks the arguments of `LockService.connect`. */
function connectionOf(target, second) {
    let urls = target;
    let options;
    if (isObject(target) && typeof target['href'] !== 'string') {
        if (second !== undefined) {
            throw (0, errors_js_1.invalid)('options', 'must be absent when the target is an options object', (0, errors_js_1.describe)(second));
        }
        options = fields('target', target, ['url', ...CONNECT]);
        urls = options['url'];
    }
    else {
        options = fields('options', second, CONNECT) ?? {};
    }
    const config = { urls: urlsOf(urls), defaults: {}, events: false };
    let value;
    if ((value = options['keyPrefix']) !== undefined)
        config.keyPrefix = text('keyPrefix', value);
    for (const name of ['collection', 'table']) {
        if ((value = options[name]) === undefined)
            continue;
        config[name] = text(name, value);
        if (value === '')
            throw (0, errors_js_1.invalid)(name, 'must not be empty', '""');
    }
    if ((value = options['storeTimeoutMs']) !== undefined)
        config.storeTimeoutMs = positiveMs('storeTimeoutMs', value);
    if ((value = options['minReplicas']) !== undefined) {
        if (!Number.isInteger(value) || value < 0 || value > MAX_REPLICAS) {
            throw (0, errors_js_1.invalid)('minReplicas', `must be a whole number from 0 to ${MAX_REPLICAS}`, (0, errors_js_1.describe)(value));
        }
        config.minReplicas = value;
    }
    const tls = fields('tls', options['tls'], TLS) ?? {};
    for (const name of ['caFile', 'certFile', 'keyFile']) {
        if ((value = tls[name]) !== undefined)
            config[name] = text(name, value);
    }
    if ((value = tls['insecure']) !== undefined)
        config.insecure = flag('insecure', value);
    config.defaults = recordOf(requestOf(pick(fields('defaults', options['defaults'], DEFAULTS) ?? {}, DEFAULTS)));
    const onEvent = options['onEvent'];
    config.events = onEvent !== undefined;
    return { config, onEvent: config.events ? callback('onEvent', onEvent) : undefined };
}
/** Returns the URLs of a target. Without a target: the URL in the environment, if it is set. */
function urlsOf(target) {
    if (target === undefined) {
        const url = process.env['HOLDFAST_URL'];
        return url ? [url] : [];
    }
    if (typeof target === 'string' || isObject(target))
        return [urlOf(target)];
    if (!Array.isArray(target)) {
        throw (0, errors_js_1.invalid)('target', 'must be a URL, a list of URLs, or an options object', (0, errors_js_1.describe)(target));
    }
    if (target.length > MAX_URLS)
        throw (0, errors_js_1.invalid)('target', `must be at most ${MAX_URLS} URLs`, `${target.length} URLs`);
    if (target.length === 0)
        throw (0, errors_js_1.invalid)('target', 'must not be an empty list', '[]');
    return Array.from({ length: target.length }, (_, index) => urlOf(target[index]));
}
const urlOf = (value) => text('target', isObject(value) ? value['href'] : value);
