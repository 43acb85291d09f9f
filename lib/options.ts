import { milliseconds, OR_TEXT, positiveMs, secondsOf, SHORT_MS, spanMs, ttlOf, warnIfShort } from './durations.js'
import { describe, invalid, LockError } from './errors.js'
import type { AcquireRecord } from './native.js'
import type { Share, SignalLike } from './types.js'

const MAX_METADATA_BYTES = 16 * 1024
const MAX_NAMES = 1000
/** @internal The largest limit of a semaphore. A writer has all of these permits, and a reader one. */
export const MAX_PERMITS = 1_048_576

/** @internal The options of `acquire`, `tryAcquire`, `using` and `tryUsing`. */
export const ACQUIRE = 'ttlMs waitMs renew signal maxHoldMs stallLimitMs minHoldMs metadata onStoreError'.split(' ')
/** @internal The options of the calls of a semaphore. */
export const PERMIT = ['permits', ...ACQUIRE]
/** @internal The object form of `acquireAndExecute`. */
export const EXECUTE = ['name', 'ttlSeconds', ...ACQUIRE]
/** @internal The options of `oncePer`. */
export const ONCE = ['periodMs', ...ACQUIRE.filter((name) => name !== 'minHoldMs')]
/** @internal The options of `elect`. */
export const ELECT = ['ttlMs', 'stallLimitMs', 'metadata', 'maxLeaders', 'signal', 'restart', 'onError', 'unref']
/** @internal A service's defaults of these options do not apply to `elect` and `oncePer`: they end a leadership, and set a period. */
export const UNLIMITED = { minHoldMs: 0, maxHoldMs: Infinity }
/** @internal The options of `watch`. */
export const WATCH = ['intervalMs', 'signal']
/** @internal The `defaults` of a service. */
export const DEFAULTS = ['ttlMs', 'waitMs', 'renew', 'maxHoldMs', 'stallLimitMs', 'minHoldMs', 'onStoreError']
const RESTORE = ['names', 'token', 'fencingToken', 'ttlMs', 'renew', 'metadata']
/** Options of other libraries, in lower case, by their names here. Of several, the first one that an object may have is meant. */
const ALIASES: Record<string, readonly string[]> = {
  storeTimeoutMs: ['timeout', 'commandtimeout', 'sockettimeout', 'connecttimeout', 'serverselectiontimeoutms'],
  waitMs: (
    'timeout acquiretimeout acquiretimeoutms retry retries retrycount retrydelay retryjitter retryinterval maxretries ' +
    'maxattempts acquireattemptslimit maxwait'
  ).split(' '),
  ttlMs: ['ttl', 'ttlms', 'ttlseconds', 'duration', 'expiry', 'expire', 'expires', 'lease', 'leasetime', 'locktimeout'],
  limit: ['limit', 'maxconcurrent', 'concurrency', 'maxcount', 'count', 'max'],
  permits: ['permits', 'n', 'weight', 'tokens'],
  maxLeaders: ['leaders', 'limit', 'count'],
  renew: ['autoextend', 'extend', 'refresh', 'refreshinterval', 'automaticextensionthreshold'],
  keyPrefix: ['prefix', 'namespace'],
  url: ['uri', 'target', 'connectionstring'],
  database: ['db'],
  username: ['user'],
  password: ['pass', 'auth'],
}

/** @internal An object of options. */
export type Fields = Record<string, unknown>

/** @internal Returns whether a value is an object, and no array. */
export const isObject = (value: unknown): value is Fields =>
  typeof value === 'object' && value !== null && !Array.isArray(value)

/**
 * @internal Checks an object of options. Rejects a promise that was not awaited and a `Map`, which have no options of their
 * own, and unknown options, which may be misspelt.
 */
export function fields(argument: string, value: unknown, known: readonly string[]): Fields | undefined {
  if (value === undefined) return undefined
  if (!isObject(value) || Object.prototype.toString.call(value) !== '[object Object]') {
    throw invalid(argument, 'must be a plain object', describe(value))
  }
  for (const key of Object.keys(value)) {
    if (known.includes(key)) continue
    const meant = meantBy(key, known)
    const suggestion = meant === undefined ? '' : ` (did you mean ${meant}?)`
    throw invalid(argument, `may have ${known.join(', ')}${suggestion}`, JSON.stringify(key.toWellFormed()))
  }
  return value
}

/** Returns the option that an unknown option probably means. */
function meantBy(key: string, known: readonly string[]): string | undefined {
  const lower = key.toLowerCase()
  if (known.includes('signal') && known.includes('waitMs')) {
    const ofSemaphore = ['limit', 'permits'].find((name) => !known.includes(name) && ALIASES[name]!.includes(lower))
    if (ofSemaphore !== undefined) return `${ofSemaphore} of locks.semaphore(name, limit)`
  }
  const [meant] = [
    ...known.filter((name) => key && name.toLowerCase().startsWith(lower)),
    ...Object.keys(ALIASES).filter((name) => known.includes(name) && ALIASES[name]!.includes(lower)),
  ]
  if (meant !== undefined || !known.includes('defaults')) return meant
  const ofCalls = meantBy(key, DEFAULTS)
  return ofCalls && `defaults.${ofCalls}`
}

/** @internal Checks a string. */
export function text(argument: string, value: unknown): string {
  if (typeof value !== 'string') throw invalid(argument, 'must be a string', describe(value))
  // UTF-8 has no lone surrogates: different names would become the same one.
  if (!value.isWellFormed()) {
    throw invalid(argument, 'must be well-formed Unicode (it has a lone surrogate)', describe(value))
  }
  return value
}

/** @internal Checks the name of a lock. The native core checks its length. */
export const nameOf = (value: unknown): string => text('name', value)

/** @internal Checks a name, or an array of names, which it copies. */
export function namesOf(value: unknown): string | string[] {
  if (typeof value === 'string') return nameOf(value)
  if (!Array.isArray(value)) throw invalid('names', 'must be a string or an array of strings', describe(value))
  if (value.length === 0) throw invalid('names', 'must not be empty', '[]')
  if (value.length > MAX_NAMES) throw invalid('names', `must be at most ${MAX_NAMES} names`, String(value.length))
  return Array.from({ length: value.length }, (_, index) => nameOf(value[index]))
}

/** @internal Checks a function. */
export function callback<F extends (...args: never[]) => unknown>(argument: string, value: unknown): F {
  if (typeof value !== 'function') throw invalid(argument, 'must be a function', describe(value))
  return value as F
}

/** @internal Checks a boolean. */
export function flag(argument: string, value: unknown): boolean {
  if (typeof value !== 'boolean') throw invalid(argument, 'must be true or false', describe(value))
  return value
}

/** Checks a whole number from 1 to `most`. */
function wholeNumber(argument: string, value: unknown, most: number, shown = String(most)): number {
  if (Number.isInteger(value) && (value as number) >= 1 && (value as number) <= most) return value as number
  const hint = argument === 'limit' && isObject(value) ? ' (pass the number itself: semaphore(name, 5))' : ''
  throw invalid(argument, `must be a whole number from 1 to ${shown}`, describe(value) + hint)
}

/** @internal Checks the limit of a semaphore, or of the leaders of an election. */
export const limitOf = (value: unknown, argument = 'limit'): number => wholeNumber(argument, value, MAX_PERMITS)

function metadataOf(value: unknown): string {
  const rule = 'must be a value that JSON can represent'
  let json: string | undefined
  try {
    json = JSON.stringify(value)
  } catch (cause) {
    // A circular object or a bigint, or the value's own `toJSON` threw.
    const { message } = invalid('metadata', rule, describe(value))
    throw new LockError('LOCK_INVALID_ARGUMENT', message, { cause })
  }
  // A function or a symbol has no JSON.
  if (typeof json !== 'string') throw invalid('metadata', rule, describe(value))
  const bytes = Buffer.byteLength(json)
  if (bytes > MAX_METADATA_BYTES) {
    throw invalid('metadata', `must be at most ${MAX_METADATA_BYTES} bytes of JSON`, `${bytes} bytes`)
  }
  return json
}

/** @internal Checks an `AbortSignal` by its members: signals of other realms and polyfills are accepted. */
export function signalOf(value: unknown): SignalLike {
  if (isObject(value)) {
    const { aborted, addEventListener, removeEventListener } = value
    const areFunctions = typeof addEventListener === 'function' && typeof removeEventListener === 'function'
    if (typeof aborted === 'boolean' && areFunctions) return value as unknown as SignalLike
  }
  throw invalid('signal', 'must be an AbortSignal', describe(value))
}

/** @internal What the calls of a semaphore, or of one side of a read/write lock, acquire. */
export interface Side {
  readonly kind: 'semaphore' | 'read' | 'write'
  /** The options of its calls. */
  readonly known: readonly string[]
  /** The permits of a call that sets none. */
  readonly permits: number
  readonly limit: number
}

/** @internal The checked options of one acquisition. `NaN` and `undefined` mean the default of the service. */
export interface Request {
  ttlMs: number
  waitMs: number
  renew: boolean | undefined
  more: AcquireRecord | undefined
  signal: SignalLike | undefined
  /** Whether the job runs without a permit when the store fails. */
  runsAnyway?: boolean
}

/**
 * @internal Checks the options of an acquisition. `renews`: the default of `renew`. `side`: it acquires a share of a shared name.
 * `mayRun`: `onStoreError` may be `'run'`.
 */
export function requestOf(options: Fields | undefined, renews: boolean, side?: Side, mayRun = false): Request {
  const request: Request = { ttlMs: NaN, waitMs: NaN, renew: undefined, more: undefined, signal: undefined }
  if (side) request.more = { share: shareOf(side, options?.['permits']) }
  if (options === undefined) return request
  let value: unknown
  let ttl: unknown
  if ((ttl = options['ttlMs']) !== undefined) request.ttlMs = ttlOf(ttl)
  if ((value = options['ttlSeconds']) !== undefined) {
    if (ttl !== undefined) throw invalid('ttlSeconds', 'must be absent when ttlMs is present', describe(value))
    request.ttlMs = secondsOf(value)
  }
  if ((value = options['waitMs']) !== undefined) {
    request.waitMs = milliseconds(value)
    if (!(request.waitMs >= 0)) {
      throw invalid('waitMs', `must be a number of milliseconds, 0 or more, Infinity${OR_TEXT}`, describe(value))
    }
  }
  if ((value = options['renew']) !== undefined) request.renew = flag('renew', value)
  if (request.ttlMs < SHORT_MS && (request.renew ?? renews)) {
    if (ttl === undefined) warnIfShort('ttlSeconds', options['ttlSeconds'], request.ttlMs)
    else warnIfShort('ttlMs', ttl, request.ttlMs)
  }
  const more = request.more ?? {}
  if ((value = options['maxHoldMs']) !== undefined) more.maxHoldMs = positiveMs('maxHoldMs', value)
  if ((value = options['stallLimitMs']) !== undefined) more.stallLimitMs = positiveMs('stallLimitMs', value)
  if ((value = options['minHoldMs']) !== undefined) more.minHoldMs = spanMs('minHoldMs', value)
  if ((value = options['onStoreError']) !== undefined) {
    if (value === 'run' && mayRun) request.runsAnyway = true
    else if (value !== 'fail' && value !== 'wait') {
      const hint = value === 'run' ? " ('run' is only for using of a semaphore)" : ''
      throw invalid('onStoreError', `must be 'fail' or 'wait'${mayRun ? " or 'run'" : hint}`, describe(value))
    }
    more.waitsForStore = value === 'wait'
  }
  if ((value = options['metadata']) !== undefined && value !== null) more.metadata = metadataOf(value)
  for (const _ in more) request.more = more
  if ((value = options['signal']) !== undefined) request.signal = signalOf(value)
  return request
}

/** Returns the share of one call. */
function shareOf({ permits, limit }: Side, given: unknown): Share {
  if (given === undefined) return { permits, limit }
  return { permits: wholeNumber('permits', given, limit, `the limit, which is ${limit}`), limit }
}

/** @internal Returns a request as one record. */
export function recordOf({ ttlMs, waitMs, renew, more }: Request): AcquireRecord {
  const record: AcquireRecord = { ...more }
  if (!Number.isNaN(ttlMs)) record.ttlMs = ttlMs
  if (!Number.isNaN(waitMs)) record.waitMs = waitMs
  if (renew !== undefined) record.renew = renew
  return record
}

/** @internal Checks the result of `lock.transferable()`, or its JSON text. Returns its parts. */
export function restorationOf(argument: unknown) {
  const rule = 'must be the result of lock.transferable()'
  let value = argument
  if (typeof argument === 'string') {
    const source = text('transferable', argument)
    try {
      value = JSON.parse(source)
    } catch {
      throw invalid('transferable', rule, 'other text')
    }
  }
  if (!isObject(value)) throw invalid('transferable', rule, describe(value))
  if ('isHeld' in value && !('token' in value)) {
    throw invalid('transferable', rule, 'the result of lock.toJSON(), which has no owner token')
  }
  const json = fields('transferable', value, RESTORE)!
  const part = (name: string) => {
    const found = json[name]
    if (found === undefined) throw invalid('transferable', rule, `no ${name}`)
    return found
  }
  const names = [namesOf(part('names'))].flat()
  const token = text('token', part('token'))
  const fencingToken = text('fencingToken', part('fencingToken'))
  return { names, token, fencingToken, options: recordOf(requestOf(pick(json, ['ttlMs', 'renew', 'metadata']), true)) }
}

/** @internal Reads each of these properties once. */
export function pick(object: Fields, names: readonly string[]): Fields {
  return Object.fromEntries(names.map((name) => [name, object[name]]))
}
