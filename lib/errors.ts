import { holderOf, withoutPrefix } from './json.js'
import type { Holder, LockErrorCode } from './types.js'

/** The largest number of frames of this package, and of the tracing channel, between an error and the caller. */
const OWN_FRAMES = 12

/**
 * The error of every rejection of holdfast. One exception: an aborted wait rejects with `signal.reason` itself. `code` names
 * the case. `instanceof` narrows `code`; {@link isLockError} also accepts errors of another copy of this package.
 */
export class LockError extends Error {
  declare readonly name: 'LockError'
  readonly code: LockErrorCode
  /** Whether the same call may succeed later, without a change. */
  readonly retryable: boolean
  /** The name of the lock, if the error concerns one: for `LOCK_TIMEOUT` the busy one of several names, otherwise the first. */
  declare readonly key?: string
  /** The store (`redis`, `mongodb`, `sqlite`, …), if the error came from it. */
  declare readonly engine?: string
  /**
   * For `LOCK_TIMEOUT`: the process that holds `key`; of several the one whose lease ends first. `null` if another tool holds it, it
   * became free meanwhile, or the store did not answer at once.
   */
  declare readonly holder?: Holder | null
  /** For `LOCK_TIMEOUT`: the rest of the holder's lease in milliseconds; `null` if it is not known. */
  declare readonly remainingMs?: number | null
  /** The error of the store's driver. For `using`: the value that `fn` threw, if the lock was lost as well. */
  declare readonly cause?: unknown

  constructor(
    code: LockErrorCode,
    message: string,
    details: {
      retryable?: boolean
      key?: string | undefined
      engine?: string | undefined
      cause?: unknown
      holder?: Holder | null
      remainingMs?: number | null
    } = {},
  ) {
    super(message, 'cause' in details ? { cause: details.cause } : undefined)
    // Adds the code to the stack, which V8 formats at the first read.
    const trace: { name: string; message: string; stack?: string } = { name: `LockError [${code}]`, message }
    // Raises the limit, so that the frames of this package do not displace those of the caller.
    const limit = Error.stackTraceLimit
    if (limit > 0) Reflect.set(Error, 'stackTraceLimit', limit + OWN_FRAMES)
    Error.captureStackTrace(trace, new.target)
    if (limit > 0) Reflect.set(Error, 'stackTraceLimit', limit)
    Object.defineProperty(this, 'stack', {
      configurable: true,
      get: () => trace.stack,
      set(stack: string) {
        trace.stack = stack
      },
    })
    this.code = code
    this.retryable = details.retryable ?? false
    if (details.key !== undefined) this.key = details.key
    if (details.engine !== undefined) this.engine = details.engine
    if (code !== 'LOCK_TIMEOUT') return
    this.holder = details.holder ?? null
    this.remainingMs = details.remainingMs ?? null
  }
}
Object.defineProperty(LockError.prototype, 'name', { value: 'LockError', configurable: true, writable: true })

/**
 * Returns whether a value is a {@link LockError} of this or another copy of this package.
 *
 * @param code accepts only this code, and narrows the type to it
 */
export function isLockError<Code extends LockErrorCode = LockErrorCode>(
  value: unknown,
  code?: Code,
): value is LockError & { readonly code: Code } & ([Code] extends ['LOCK_TIMEOUT']
    ? { readonly holder: Holder | null; readonly remainingMs: number | null }
    : unknown) {
  if (typeof value !== 'object' || value === null) return false
  const error = value as Partial<LockError>
  return (
    error.name === 'LockError' && typeof error.retryable === 'boolean' && (code === undefined || error.code === code)
  )
}

/**
 * @internal Creates the `LockError` that the native core describes.
 *
 * @param prefix the prefix of a view (`withPrefix`), which the error omits from names
 * @param more overrides details
 */
export function errorOf(native: string | Record<string, any>, prefix: string, more?: { cause: unknown }): LockError {
  const { code, message, retryable, key, engine, cause, busy } =
    typeof native === 'string' ? JSON.parse(native) : native
  const details = {
    retryable,
    key: typeof key === 'string' ? withoutPrefix(key, prefix) : undefined,
    engine: engine ?? undefined,
    ...(cause === null ? {} : { cause: driverError(cause) }),
    ...(busy ? { holder: holderOf(busy.holder), remainingMs: busy.remainingMs ?? Infinity } : {}),
    ...more,
  }
  const quoted = JSON.stringify(prefix).slice(0, -1)
  return new LockError(code, prefix === '' ? message : message.replaceAll(quoted, '"'), details)
}

/** Creates the error of a driver, without a JavaScript stack. */
function driverError(message: string): Error {
  return Object.defineProperty(new Error(message), 'stack', {
    value: `Error: ${message}`,
    configurable: true,
    writable: true,
  })
}

/** @internal Converts the rejection of a native promise to a `LockError`. */
export function fromNative(thrown: unknown, prefix: string): unknown {
  return typeof thrown === 'string' ? errorOf(thrown, prefix) : thrown
}

/** @internal Awaits a native call. Throws the `LockError` of its rejection. */
export async function answerOf<T>(call: Promise<T>, prefix = ''): Promise<T> {
  try {
    return await call
  } catch (thrown) {
    throw fromNative(thrown, prefix)
  }
}

/** @internal Creates the error of an invalid argument. */
export function invalid(argument: string, rule: string, got: string): LockError {
  return new LockError('LOCK_INVALID_ARGUMENT', `${argument} ${rule}, got ${got}`)
}

/** @internal Returns a short text that shows a value in a message. */
export function describe(value: unknown): string {
  switch (typeof value) {
    case 'undefined':
    case 'boolean':
      return String(value)
    case 'number':
      return Object.is(value, -0) ? '-0' : String(value)
    case 'string': {
      const shown = JSON.stringify([...value.slice(0, 120).toWellFormed()].slice(0, 60).join(''))
      return value.length <= 60 ? shown : `${shown}… (${Buffer.byteLength(value)} bytes)`
    }
    case 'function':
      return 'a function'
    case 'object':
      return value === null ? 'null' : Array.isArray(value) ? 'an array' : 'an object'
    default:
      return 'a symbol, bigint or external'
  }
}

/** @internal Returns the stack of what a function of the user threw, or a short text that shows it. */
export function stackOf(thrown: any): string {
  try {
    const stack = typeof thrown === 'object' ? thrown?.stack : undefined
    return typeof stack === 'string' ? stack : describe(thrown)
  } catch {
    // The value is the user's: a getter of it may throw.
    return 'with a value that cannot be shown'
  }
}

/** @internal Emits a `HoldfastWarning` with a code. */
export function warn(code: `HOLDFAST_${string}`, text: string): void {
  process.emitWarning(text, { type: 'HoldfastWarning', code })
}
