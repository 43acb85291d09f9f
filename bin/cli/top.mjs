// `holdfast top`.
import { setTimeout } from 'node:timers/promises'
import { isLockError } from '../../index.js'
import { interrupted, intervalOf, oneOf, prefixOf, sharedOf, withLocks } from './common.mjs'
import { complain, cut, printable, summaryOf, table } from './text.mjs'

/** Locks, or the state of a semaphore or a read/write lock. @typedef {LockInfo[] | import('../../index.js').SharedInfo} Found */
/** @typedef {import('../../index.js').LockInfo} LockInfo */
/** An outage: the time of the last answer, and what failed. @typedef {{ since: Date, cause: string }} Outage */
/** @typedef {{ show(found: Found): void, fail(outage: Outage): void }} View */

/** A read that takes longer is shown as an outage, in milliseconds. */
const LATE_MS = 1000

/** @type {import('./common.mjs').Run} */
export async function top(positionals, values) {
  const name = values.shared ? oneOf(positionals) : undefined
  const prefix = name === undefined ? prefixOf(positionals) : undefined
  const intervalMs = intervalOf(values)
  const signal = interrupted()
  const view = process.stdout.isTTY && !values.json ? new Screen() : new Lines()
  let since = new Date()
  let [hasAnswered, isFailing] = [false, false]
  const body = async (/** @type {import('../../index.js').LockService} */ locks) => {
    while (!signal.aborted) {
      const late = globalThis.setTimeout(() => {
        if (!isFailing) view.fail({ since, cause: 'it has not answered yet' })
      }, LATE_MS)
      try {
        view.show(await (name === undefined ? locks.list({ prefix }) : sharedOf(locks, name).inspect()))
        since = new Date()
        hasAnswered = true
        isFailing = false
      } catch (error) {
        // Such as a wrong password.
        if (!isLockError(error, 'LOCK_STORE') || !(error.retryable || hasAnswered)) throw error
        isFailing = true
        view.fail({ since, cause: error.message })
      } finally {
        clearTimeout(late)
      }
      await setTimeout(intervalMs, undefined, { signal })
    }
  }
  await withLocks(values, body, signal)
  return 0
}

/** One JSON value per read; outages on standard error. @implements {View} */
class Lines {
  #isFailing = false

  /** @param {Found} found */
  show(found) {
    if (this.#isFailing) complain('the store answers again')
    this.#isFailing = false
    console.log(JSON.stringify(found))
  }

  /** @param {Outage} outage */
  fail({ since, cause }) {
    if (!this.#isFailing) complain(`no answer from the store since ${since.toISOString()}: ${cause}`)
    this.#isFailing = true
  }
}

/** A table that fills the terminal at most. @implements {View} */
class Screen {
  /** @type {Found} */
  #found = []
  /** @type {Outage | undefined} */
  #outage
  #at = new Date()

  constructor() {
    process.stdout.on('resize', () => this.#draw())
  }

  /** @param {Found} found */
  show(found) {
    this.#found = found
    this.#outage = undefined
    this.#at = new Date()
    this.#draw()
  }

  /** @param {Outage} outage */
  fail(outage) {
    this.#outage = outage
    this.#draw()
  }

  #draw() {
    // A terminal without a known size has 0 of both.
    const columns = process.stdout.columns || 80
    const rows = process.stdout.rows || 24
    // The header of the table and two lines above it, a line below it, and that of the cursor.
    const fitting = Math.max(0, rows - 5)
    const found = this.#found
    const isList = Array.isArray(found)
    const more = (isList ? found : found.holders).length - fitting
    const lines = [
      `${this.#at.toISOString()}  ${isList ? `${found.length} held` : summaryOf(found)}`,
      this.#outage
        ? printable(`no answer from the store since ${this.#outage.since.toISOString()}: ${this.#outage.cause}`)
        : '',
      ...table(found, fitting),
      ...(more > 0 ? [`… and ${more} more`] : []),
    ]
    const shown = lines.slice(0, Math.max(1, rows - 1)).map((line) => `${cut(line, columns)}\x1b[K\n`)
    process.stdout.write(`\x1b[H${shown.join('')}\x1b[J`)
  }
}
