// Small helpers that most tests need.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'

export { sleep }

/** The package as a child process imports it. */
export const INDEX = new URL('../index.js', import.meta.url).href

/** A limit for wake-ups: the safety poll (every 5 s) and the end of a 30 s lease come later than this. */
export const SOON_MS = 3000

/**
 * Waits until `check` returns something truthy, and returns that.
 *
 * @template T
 * @param {string} what
 * @param {() => T | Promise<T>} check
 * @returns {Promise<Exclude<T, undefined | null | false | 0 | ''>>}
 */
export async function until(what, check, withinMs = 15_000) {
  const end = Date.now() + withinMs
  for (;;) {
    const value = await check()
    if (value) return /** @type {any} */ (value)
    assert.ok(Date.now() < end, `not within ${withinMs} ms: ${what}`)
    await sleep(5)
  }
}

/**
 * Returns what a promise rejects with.
 *
 * @param {Promise<unknown>} promise
 * @returns {Promise<any>}
 */
export async function rejection(promise) {
  let value
  try {
    value = await promise
  } catch (thrown) {
    return thrown
  }
  assert.fail(`expected a rejection, got ${typeof value === 'object' ? 'an object' : String(value)}`)
}

/**
 * Asserts all properties of an error of holdfast.
 *
 * @param {any} error
 * @param {import('../index.js').LockErrorCode} code
 * @param {Record<string, unknown>} [expected]
 */
export function assertLockError(error, code, expected = {}) {
  assert.equal(error instanceof Error, true, `an Error, got ${String(error)}`)
  assert.ok(error.code === code, `${code}, got ${error.code}: ${error.message}`)
  assert.equal(error.name, 'LockError')
  assert.equal(typeof error.message, 'string')
  assert.ok(error.message.length > 0)
  assert.equal(typeof error.retryable, 'boolean')
  for (const [field, value] of Object.entries(expected)) assert.equal(error[field], value, `error.${field}`)
}

/**
 * Asserts that a promise rejects with this code. Returns the error.
 *
 * @param {Promise<unknown>} promise
 * @param {import('../index.js').LockErrorCode} code
 * @param {Record<string, unknown>} [expected]
 * @returns {Promise<import('../index.js').LockError & { cause: any }>}
 */
export async function rejects(promise, code, expected) {
  const error = await rejection(promise)
  assertLockError(error, code, expected)
  return error
}

/**
 * Blocks the event loop, without using its core.
 *
 * @param {number} ms
 */
export const block = (ms) => void Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms)

/**
 * Marks a promise as handled that is awaited later, so that an earlier failure is reported and not its rejection.
 *
 * @template {Promise<unknown>} T
 * @param {T} promise
 */
export function later(promise) {
  promise.catch(() => {})
  return promise
}

/**
 * Returns a value of a wrong type, which a test passes on purpose.
 *
 * @param {unknown} value
 * @returns {any}
 */
export const wrong = (value) => value

/**
 * Waits until a service has `count` waiting calls.
 *
 * @param {import('../index.js').LockService} service
 * @param {number} count
 */
export const waiting = (service, count) => until(`${count} waiting`, () => service.stats().waiting === count)

/**
 * Reads a lock that is held.
 *
 * @param {import('../index.js').LockService} service
 * @param {string} name
 */
export async function inspectHeld(service, name) {
  return (await service.inspect(name)) ?? assert.fail(`${name} is free`)
}

/**
 * Asserts that a name is free, at once or after a release that is in progress.
 *
 * @param {import('../index.js').LockService} service
 * @param {string} name
 */
export async function assertFree(service, name) {
  const lock = await service.acquire(name, { waitMs: SOON_MS })
  assert.equal(await lock.release(), true)
}

/**
 * Returns how long a promise took, in milliseconds.
 *
 * @param {Promise<unknown>} promise
 */
export async function timed(promise) {
  const start = performance.now()
  await promise
  return performance.now() - start
}

/** Measures for how long this process, and so most of the machine, stalled. */
export class StallMeter {
  static TICK_MS = 20
  #last = performance.now()
  #total = 0

  constructor() {
    this.timer = setInterval(() => {
      this.#total = this.totalMs
      this.#last = performance.now()
    }, StallMeter.TICK_MS)
    this.timer.unref()
  }

  /** Total lateness of the timers since the start, in milliseconds. */
  get totalMs() {
    return this.#total + Math.max(0, performance.now() - this.#last - StallMeter.TICK_MS)
  }
}

/** @type {StallMeter | undefined} */
let stallMeter

/** Returns a function that returns for how long this process has stalled since this call, in milliseconds. */
export function stallwatch() {
  const meter = (stallMeter ??= new StallMeter())
  const before = meter.totalMs
  return () => meter.totalMs - before
}

/**
 * Starts a stopwatch for upper bounds. It leaves out the time for which this process stalled.
 *
 * From the first call on, a timer wakes the event loop every 20 ms: not for tests where nothing may wake it.
 */
export function stopwatch() {
  const [startedAt, stalledMs] = [performance.now(), stallwatch()]
  return () => Math.round(performance.now() - startedAt - stalledMs())
}

/**
 * Makes a call that prepares a test, and repeats it while its store timeout passes: the machine may stand still meanwhile.
 *
 * @template T
 * @param {() => Promise<T>} call
 * @returns {Promise<T>}
 */
export async function prepared(call) {
  for (let attempt = 1; ; attempt++) {
    try {
      return await call()
    } catch (error) {
      if (error.code !== 'LOCK_STORE' || !error.retryable || attempt === 5) throw error
    }
  }
}

/**
 * Makes calls, and repeats them when one fails with a retryable `LOCK_STORE` while this process stalled: then the store timeout may have
 * passed meanwhile.
 *
 * @template T
 * @param {(attempt: number) => Promise<T>} calls
 * @returns {Promise<T>}
 */
export async function unlessStalled(calls) {
  for (let attempt = 1; ; attempt++) {
    const stalledMs = stallwatch()
    try {
      return await calls(attempt)
    } catch (error) {
      if (error.code !== 'LOCK_STORE' || !error.retryable || attempt === 5 || stalledMs() < 250) throw error
    }
  }
}

/**
 * Returns the median of numbers; of an even count the larger one in the middle.
 *
 * @param {number[]} values
 */
export const median = (values) => [...values].sort((one, other) => one - other)[values.length >> 1]

/**
 * Asserts that numbers or bigints grow strictly.
 *
 * @param {(number | bigint)[]} values
 */
export function assertGrowing(values) {
  for (let i = 1; i < values.length; i++) assert.ok(values[i] > values[i - 1], `${values[i]} after ${values[i - 1]}`)
}

/**
 * Runs JavaScript in a separate process. Resolves to its stdout, stderr and exit code. `args` begin at `process.argv[1]`.
 *
 * @typedef {{ args?: string[], env?: NodeJS.ProcessEnv, flags?: string[], commonjs?: boolean }} RunOptions
 * @param {string} code
 * @param {RunOptions} [options]
 * @returns {Promise<{ code: number | string | undefined, stdout: string, stderr: string }>}
 */
export function runNode(code, { args = [], env = {}, flags = [], commonjs = false } = {}) {
  const type = commonjs ? 'commonjs' : 'module'
  const argv = [...flags, `--input-type=${type}`, '-e', code, '--', ...args]
  const cwd = fileURLToPath(new URL('.', import.meta.url))
  const options = { env: { ...process.env, ...env }, cwd, timeout: 60_000 }
  return new Promise((resolve) => {
    execFile(process.execPath, argv, options, (error, stdout, stderr) => {
      resolve({ code: error ? (error.code ?? error.signal) : 0, stdout, stderr })
    })
  })
}

/**
 * Runs JavaScript as `runNode` does, and asserts that it succeeds. Returns what it printed.
 *
 * @param {string} code
 * @param {RunOptions} [options]
 */
export async function output(code, options) {
  const { code: status, stdout, stderr } = await runNode(code, options)
  assert.equal(status, 0, stderr)
  return stdout.trim()
}

/** Returns the warnings of a process that connects and uses a lock, each on a line. @param {string} url */
export function warningsOf(url) {
  const code = `
    import { LockService } from ${JSON.stringify(INDEX)}
    process.on('warning', ({ code, message }) => console.log(code, message))
    const locks = await LockService.connect(process.argv[1])
    await locks.using('n', () => {})
    await locks.close()`
  return output(code, { args: [url], flags: ['--no-warnings'] })
}
