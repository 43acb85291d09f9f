"use strict";
Object.defineProperty(exports, "__esModule", { value: true });
exports.LockError = void 0;
exports.isLockError = isLockError;
exports.errorOf = errorOf;
exports.fromNative = fromNative;
exports.invalid = invalid;
exports.describe = describe;
exports.warn = warn;
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
        Error.captureStackTrace(trace, new.target);
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
    }
}
exports.LockError = LockError;
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
/** @internal Creates the `LockError` that the native core describes. `more` overrides details. */
function errorOf(native, more) {
    const { code, message, retryable, key, engine, cause } = typeof native === 'string' ? JSON.parse(native) : native;
    const details = { retryable, key: key ?? undefined, engine: engine ?? undefined };
    return new LockError(code, message, { ...details, ...(cause === null ? {} : { cause: driverError(cause) }), ...more });
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
function fromNative(thrown) {
    return typeof thrown === 'string' ? errorOf(thrown) : thrown;
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
/** @internal Emits a `HoldfastWarning`. */
function warn(text) {
    process.emitWarning(text, 'HoldfastWarning');
}
