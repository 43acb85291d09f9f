import { describe, invalid, LockError } from './errors.js'
import type { AcquireRecord, Config } from './native.js'
import type { LockEvent, SignalLike } from './types.js'

const MAX_MS = 2 ** 31
const MAX_METADATA_BYTES = 16 * 1024
const MAX_NAMES = 1000
const MAX_URLS = 100
const MAX_REPLICAS = 100

/** @internal The options of `acquire`, `tryAcquire` and `using`. */
export const ACQUIRE = ['ttlMs', 'waitMs', 'renew', 'signal', 'maxHoldMs', 'stallLimitMs', 'minHoldMs', 'metadata']
/** @internal The object form of `acquireAndExecute`. */
export const EXECUTE = ['name', 'ttlSeconds', 'waitMs', 'renew', 'minHoldMs', 'signal']
const DEFAULTS = ['ttlMs', 'waitMs', 'renew', 'maxHoldMs', 'stallLimitMs', 'minHoldMs']
const RESTORE = ['names', 'token', 'fencingToken', 'ttlMs', 'renew', 'metadata']
const CONNECT = ['keyPrefix', 'collection', 'table', 'storeTimeoutMs', 'minReplicas', 'defaults', 'tls', 'onEvent']
const TLS = ['caFile', 'certFile', 'keyFile', 'insecure']
/** Options of other libraries, in lower case, and their names here. */
const ALIASES: Record<string, string> = { timeout: 'waitMs', duration: 'ttlMs', expiry: 'ttlMs' }
const UNITS: Record<string, number> = { ms: 1, s: 1000, m: 60_000, h: 3_600_000 }

type Fields = Record<string, unknown>

const isObject = (value: unknown): value is Fields =>
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
    const lower = key.toLowerCase()
    const meant = known.find((name) => key && name.toLowerCase().startsWith(lower)) ?? ALIASES[lower]
    const suggestion = meant !== undefined && known.includes(meant) ? ` (did you mean ${meant}?)` : ''
    throw invalid(argument, `may have ${known.join(', ')}${suggestion}`, JSON.stringify(key.toWellFormed()))
  }
  return value
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

/** Converts a number, or text with a unit such as `'30s'`, to milliseconds. Other values give `NaN`. */
function milliseconds(value: unknown): number {
  if (typeof value === 'number') return value
  const [, amount, unit] = (typeof value === 'string' && /^(\d+(?:\.\d+)?)(ms|s|m|h)$/.exec(value)) || []
  return amount === undefined ? NaN : Number(amount) * UNITS[unit!]!
}

/** @internal Checks a duration: more than zero, at most 2^31 ms. Returns milliseconds. */
export function positiveMs(argument: string, value: unknown): number {
  const ms = milliseconds(value)
  if (ms > 0 && ms <= MAX_MS) return ms
  throw invalid(argument, 'must be a number of milliseconds, more than 0 and at most 2147483648', describe(value))
}

/** @internal Checks the `ttlSeconds` of the gist's functions. Returns milliseconds. */
export function secondsOf(value: unknown): number {
  const ms = typeof value === 'number' ? value * 1000 : NaN
  if (ms > 0 && ms <= MAX_MS) return ms
  throw invalid('ttlSeconds', 'must be a number of seconds, more than 0 and at most 2147483.648', describe(value))
}

function flag(argument: string, value: unknown): boolean {
  if (typeof value !== 'boolean') throw invalid(argument, 'must be true or false', describe(value))
  return value
}

function metadataOf(value: unknown): string {
  const rule = 'must be a value that JSON can carry'
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

/** Checks an `AbortSignal` by its members: signals of other realms and polyfills are accepted. */
function signalOf(value: unknown): SignalLike {
  if (isObject(value)) {
    const { aborted, addEventListener, removeEventListener } = value
    const areFunctions = typeof addEventListener === 'function' && typeof removeEventListener === 'function'
    if (typeof aborted === 'boolean' && areFunctions) return value as unknown as SignalLike
  }
  throw invalid('signal', 'must be an AbortSignal', describe(value))
}

/** @internal The checked options of one acquisition. `NaN` and `undefined` mean the default of the service. */
export interface Request {
  ttlMs: number
  waitMs: number
  renew: boolean | undefined
  more: AcquireRecord | undefined
  signal: SignalLike | undefined
}

/** @internal Checks the options of an acquisition. */
export function requestOf(options: Fields | undefined): Request {
  const request: Request = { ttlMs: NaN, waitMs: NaN, renew: undefined, more: undefined, signal: undefined }
  if (options === undefined) return request
  let value: unknown
  if ((value = options['ttlMs']) !== undefined) request.ttlMs = positiveMs('ttlMs', value)
  if ((value = options['ttlSeconds']) !== undefined) request.ttlMs = secondsOf(value)
  if ((value = options['waitMs']) !== undefined) {
    request.waitMs = milliseconds(value)
    if (!(request.waitMs >= 0)) {
      throw invalid('waitMs', 'must be a number of milliseconds, 0 or more, or Infinity', describe(value))
    }
  }
  if ((value = options['renew']) !== undefined) request.renew = flag('renew', value)
  const more: AcquireRecord = {}
  if ((value = options['maxHoldMs']) !== undefined) more.maxHoldMs = positiveMs('maxHoldMs', value)
  if ((value = options['stallLimitMs']) !== undefined) more.stallLimitMs = positiveMs('stallLimitMs', value)
  if ((value = options['minHoldMs']) !== undefined) {
    const ms = milliseconds(value)
    if (!(ms >= 0 && ms <= MAX_MS)) {
      throw invalid('minHoldMs', 'must be a number of milliseconds from 0 to 2147483648', describe(value))
    }
    more.minHoldMs = ms
  }
  if ((value = options['metadata']) !== undefined && value !== null) more.metadata = metadataOf(value)
  for (const _ in more) request.more = more
  if ((value = options['signal']) !== undefined) request.signal = signalOf(value)
  return request
}

/** Returns a request as one record. */
function recordOf({ ttlMs, waitMs, renew, more }: Request): AcquireRecord {
  const record: AcquireRecord = { ...more }
  if (!Number.isNaN(ttlMs)) record.ttlMs = ttlMs
  if (!Number.isNaN(waitMs)) record.waitMs = waitMs
  if (renew !== undefined) record.renew = renew
  return record
}

/** @internal Checks the result of `Lock.toJSON()`, or its text. Returns its parts. */
export function restorationOf(argument: unknown) {
  const rule = 'must be the result of Lock.toJSON()'
  let value = argument
  if (typeof argument === 'string') {
    const source = text('json', argument)
    try {
      value = JSON.parse(source)
    } catch {
      throw invalid('json', rule, 'other text')
    }
  }
  if (!isObject(value)) throw invalid('json', rule, describe(value))
  const json = fields('json', value, RESTORE)!
  const part = (name: string) => {
    const found = json[name]
    if (found === undefined) throw invalid('json', rule, `no ${name}`)
    return found
  }
  const names = [namesOf(part('names'))].flat()
  const token = text('token', part('token'))
  const fencingToken = text('fencingToken', part('fencingToken'))
  return { names, token, fencingToken, options: recordOf(requestOf({ ...pick(json, ['ttlMs', 'renew', 'metadata']) })) }
}

/** Reads each of these properties once. */
function pick(object: Fields, names: readonly string[]): Fields {
  return Object.fromEntries(names.map((name) => [name, object[name]]))
}

/** @internal Checks the arguments of `LockService.connect`. */
export function connectionOf(
  target: unknown,
  second: unknown,
): { config: Config; onEvent: ((event: LockEvent) => unknown) | undefined } {
  let urls = target
  let options: Fields
  if (isObject(target) && typeof target['href'] !== 'string') {
    if (second !== undefined) {
      throw invalid('options', 'must be absent when the target is an options object', describe(second))
    }
    options = fields('target', target, ['url', ...CONNECT])!
    urls = options['url']
  } else {
    options = fields('options', second, CONNECT) ?? {}
  }
  const config: Config = { urls: urlsOf(urls), defaults: {}, events: false }
  let value: unknown
  if ((value = options['keyPrefix']) !== undefined) config.keyPrefix = text('keyPrefix', value)
  for (const name of ['collection', 'table'] as const) {
    if ((value = options[name]) === undefined) continue
    config[name] = text(name, value)
    if (value === '') throw invalid(name, 'must not be empty', '""')
  }
  if ((value = options['storeTimeoutMs']) !== undefined) config.storeTimeoutMs = positiveMs('storeTimeoutMs', value)
  if ((value = options['minReplicas']) !== undefined) {
    if (!Number.isInteger(value) || (value as number) < 0 || (value as number) > MAX_REPLICAS) {
      throw invalid('minReplicas', `must be a whole number from 0 to ${MAX_REPLICAS}`, describe(value))
    }
    config.minReplicas = value as number
  }
  const tls = fields('tls', options['tls'], TLS) ?? {}
  for (const name of ['caFile', 'certFile', 'keyFile'] as const) {
    if ((value = tls[name]) !== undefined) config[name] = text(name, value)
  }
  if ((value = tls['insecure']) !== undefined) config.insecure = flag('insecure', value)
  config.defaults = recordOf(requestOf(pick(fields('defaults', options['defaults'], DEFAULTS) ?? {}, DEFAULTS)))
  const onEvent = options['onEvent']
  config.events = onEvent !== undefined
  return { config, onEvent: config.events ? callback('onEvent', onEvent) : undefined }
}

/** Returns the URLs of a target. Without a target: the URL in the environment, if it is set. */
function urlsOf(target: unknown): string[] {
  if (target === undefined) {
    const url = process.env['HOLDFAST_URL']
    return url ? [url] : []
  }
  if (typeof target === 'string' || isObject(target)) return [urlOf(target)]
  if (!Array.isArray(target)) {
    throw invalid('target', 'must be a URL, a list of URLs, or an options object', describe(target))
  }
  if (target.length > MAX_URLS) throw invalid('target', `must be at most ${MAX_URLS} URLs`, `${target.length} URLs`)
  if (target.length === 0) throw invalid('target', 'must not be an empty list', '[]')
  return Array.from({ length: target.length }, (_, index) => urlOf(target[index]))
}

const urlOf = (value: unknown): string => text('target', isObject(value) ? value['href'] : value)
