// What the commands share: exit codes, arguments, and the connection to the store.
import { setTimeout } from 'node:timers/promises'
import { LockService } from '../../index.js'

/** @typedef {import('../../index.js').LockInfo} LockInfo */
/** @typedef {import('../../index.js').Duration} Duration */
/** @typedef {Record<string, string | boolean | undefined>} Values */
/** @typedef {(positionals: string[], values: Values, command: string[]) => Promise<number>} Run */
/** @typedef {{ usage: string, about: string, options: Record<string, string>, run: Run }} Command */

/** Exit codes, those of sysexits.h where one fits. */
export const USAGE = 64
export const STORE_FAILED = 69
export const OUTPUT_FAILED = 74
export const BUSY = 75
export const LOST = 76
export const NOT_EXECUTABLE = 126
export const NOT_FOUND = 127

/** The longest time of a timer of Node.js. */
const LONGEST_TIMER_MS = 2 ** 31 - 1
/** How long the end waits for the store, in milliseconds. */
const CLOSE_MS = 1000

/** An error of the caller. */
export class UsageError extends Error {}

/**
 * Calls `body` with a service of the store. The first call of the service connects. The caller ends the process afterwards.
 *
 * @template T
 * @param {Values} values
 * @param {(locks: LockService) => Promise<T>} body holds no lock at its end
 * @param {AbortSignal} [signal] ends a `body` that only reads: resolves at once, also while a call waits for the store
 */
export async function withLocks(values, body, signal) {
  const { url } = values
  if (String(url ?? process.env.HOLDFAST_URL).startsWith('memory:'))
    throw new UsageError(
      'memory: is a store of one process, and the command line needs one that processes share: set --url or HOLDFAST_URL',
    )
  const options = connectOptionsOf(values)
  const locks = await (typeof url === 'string' ? LockService.connect(url, options) : LockService.connect(options))
  const aborted = new Promise((resolve) => signal?.addEventListener('abort', resolve))
  try {
    return /** @type {T} */ (await Promise.race([body(locks), aborted]))
  } finally {
    // Calls of `body` have waited for a store that does not answer: not for its whole timeout again.
    if (!signal?.aborted) await Promise.race([locks.close(), setTimeout(CLOSE_MS)])
  }
}

/**
 * Returns the options of `connect`.
 *
 * @param {Values} values
 * @returns {import('../../index.js').ConnectOptions}
 */
function connectOptionsOf(values) {
  const given = (/** @type {Values} */ options) =>
    Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined))
  const { 'key-prefix': keyPrefix, table, collection } = values
  const tls = given({ caFile: values['ca-file'], certFile: values['cert-file'], keyFile: values['key-file'] })
  const hasTls = Object.keys(tls).length > 0
  return { lazy: true, ...given({ keyPrefix, table, collection }), ...(hasTls ? { tls } : {}) }
}

/**
 * Returns the time of an option.
 *
 * @param {Values} values
 * @param {string} option
 * @param {string} [otherwise]
 */
export function timeOf(values, option, otherwise) {
  const text = values[option] ?? otherwise
  if (text === undefined) return undefined
  if (!/^(0|\d+(\.\d+)?(ms|s|m|h))$/.test(String(text))) {
    throw new UsageError(`--${option} must be a time such as 500ms, 30s, 5m or 1h, got ${JSON.stringify(text)}`)
  }
  return text === '0' ? 0 : /** @type {Duration} */ (text)
}

/**
 * Returns the time of `--interval`, in milliseconds.
 *
 * @param {Values} values
 */
export function intervalOf(values) {
  const ms = millisecondsOf(timeOf(values, 'interval', '1s') ?? 0)
  if (ms > 0 && ms <= LONGEST_TIMER_MS) return ms
  throw new UsageError(`--interval must be more than 0, at most 24 days, got ${JSON.stringify(values.interval)}`)
}

/** @param {Duration} time */
export function millisecondsOf(time) {
  if (typeof time === 'number') return time
  const units = /** @type {Record<string, number>} */ ({ ms: 1, s: 1000, m: 60_000, h: 3_600_000 })
  return parseFloat(time) * units[time.replace(/^[\d.]+/, '')]
}

/**
 * Returns the only name.
 *
 * @param {string[]} names
 */
export function oneOf(names) {
  if (names.length === 1) return names[0]
  throw new UsageError(names.length === 0 ? 'expected one name, got 0' : `expected one name, got ${quoted(names)}`)
}

/**
 * Returns the prefix, if there is one.
 *
 * @param {string[]} positionals
 */
export function prefixOf(positionals) {
  if (positionals.length <= 1) return positionals[0]
  throw new UsageError(`expected one prefix, got ${quoted(positionals)}`)
}

/**
 * Returns what inspects and releases all holders of a shared name. The limit belongs to calls that acquire.
 *
 * @param {LockService} locks
 * @param {string} name
 */
export function sharedOf(locks, name) {
  return locks.semaphore(name, 1)
}

/** @param {string[]} texts */
export function quoted(texts) {
  return texts.map((text) => JSON.stringify(text)).join(', ')
}

/** Returns a signal that aborts when the process is interrupted. */
export function interrupted() {
  const controller = new AbortController()
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP']) process.once(signal, () => controller.abort())
  return controller.signal
}
