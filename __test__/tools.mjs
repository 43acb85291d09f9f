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

/** Waits until `check` returns something truthy, and returns that. */
export async function until(what, check, withinMs = 15_000) {
  const end = Date.now() + withinMs
  for (;;) {
    const value = await check()
    if (value) return value
    assert.ok(Date.now() < end, `not within ${withinMs} ms: ${what}`)
    await sleep(5)
  }
}

/** Returns what a promise rejects with. */
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

/** Asserts that a promise rejects with this code. Returns the error. */
export async function rejects(promise, code, expected) {
  const error = await rejection(promise)
  assertLockError(error, code, expected)
  return error
}

/** Waits until a service has `count` waiting calls. */
export const waiting = (service, count) => until(`${count} waiting`, () => service.stats().waiting === count)

/** Asserts that a name is free, at once or after a release that is in progress. */
export async function assertFree(service, name) {
  const lock = await service.acquire(name, { waitMs: SOON_MS })
  assert.equal(await lock.release(), true)
}

/** Returns how long a promise took, in milliseconds. */
export async function timed(promise) {
  const start = performance.now()
  await promise
  return performance.now() - start
}

/** Asserts that numbers or bigints grow strictly. */
export function assertGrowing(values) {
  for (let i = 1; i < values.length; i++) assert.ok(values[i] > values[i - 1], `${values[i]} after ${values[i - 1]}`)
}

/**
 * Runs JavaScript in a separate process. Resolves to its stdout, stderr and exit code. `args` begin at `process.argv[1]`.
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

/** Runs JavaScript as `runNode` does, and asserts that it succeeds. Returns what it printed. */
export async function output(code, options) {
  const { code: status, stdout, stderr } = await runNode(code, options)
  assert.equal(status, 0, stderr)
  return stdout.trim()
}
