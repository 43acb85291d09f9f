// The waiters of one contender, in one or several processes: all of them acquire the same lock, one after the other.
import { setTimeout as sleep } from 'node:timers/promises'
import { startContender } from './contender-process.mjs'

/** How long a lock is held, in milliseconds. */
export const HOLD = { leastMs: 4, mostMs: 8 }
const NAME = 'n'
/** The limit for late messages of a process that does not run, in milliseconds. */
const LONGEST_LATE_MS = 10_000

/** A word that never changes: to wait for a part of a millisecond without using the CPU. */
const UNCHANGED = new Int32Array(new SharedArrayBuffer(4))

export class Waiters {
  #processes
  #wait
  #failure
  /** The process that waits again after the next grant. */
  #next
  #isHeldForEver = false
  #hasEnded = false
  got = []
  releasing = []

  /**
   * Starts `count` processes of a contender.
   *
   * @param {any} target
   * @param {{ name: string, retryMs?: number, options?: import('node:child_process').ForkOptions }} contender
   * @param {number} count
   */
  static async start(target, { name, retryMs, options }, count) {
    const waiters = new Waiters()
    waiters.#wait = { name: NAME, retryMs }
    waiters.#processes = await Promise.all(Array.from({ length: count }, () => startContender(name, target, options)))
    for (const each of waiters.#processes) {
      each.failure.catch((error) => (waiters.#failure ??= error))
      each.receive(({ got, releasing }) => waiters.#receive(each, got, releasing))
    }
    return waiters
  }

  /** The releasing process waits again once the next holder has the lock, so that the number of waiters is constant. */
  #receive(process, got, releasing) {
    if (got) {
      this.got.push(got)
      if (!this.#isHeldForEver) void this.#endHold(process)
      if (this.#next) this.#join(this.#next)
      this.#next = undefined
    } else if (releasing) {
      this.releasing.push(releasing)
      if (this.got.length > this.releasing.length) this.#join(process)
      else this.#next = process
    }
  }

  #join(process) {
    if (!this.#hasEnded) process.send({ what: 'join', ...this.#wait })
  }

  /**
   * Has a holder release its lock at a random time, which this process chooses: all timers of a Node process end on the same
   * milliseconds. Those of a holder would end together with those of the waiters beside it, and a waiter that polls would always try
   * at the moment of the release.
   */
  async #endHold(holder) {
    await sleep(HOLD.leastMs + Math.random() * (HOLD.mostMs - HOLD.leastMs - 1))
    Atomics.wait(UNCHANGED, 0, 0, Math.random())
    if (!this.#hasEnded) holder.send({ what: 'release' })
  }

  join(count) {
    for (let index = 0; index < count; index++) this.#join(this.#processes[index % this.#processes.length])
  }

  /** The next holder does not release the lock. */
  holdForEver() {
    this.#isHeldForEver = true
  }

  /** Acquires and releases the lock in `count` loops, for some milliseconds. Resolves to the grants per second. */
  async contend(count, ms) {
    const inFlight = count / this.#processes.length
    const message = { what: 'contend', ...this.#wait, inFlight, ms }
    const answers = await Promise.all(this.#processes.map((each) => each.ask(message)))
    const grants = answers.reduce((sum, { count }) => sum + count, 0)
    return (grants / Math.max(...answers.map(({ elapsedMs }) => elapsedMs))) * 1000
  }

  /** Waits for `count` more hand-offs, at most for `longestMs`. Resolves to their number. */
  async handOffs(count, longestMs) {
    const [before, end] = [this.got.length, performance.now() + longestMs]
    while (this.got.length < before + count && performance.now() < end) {
      if (this.#failure) throw this.#failure
      await sleep(2)
    }
    return this.got.length - before
  }

  /**
   * Lists the times from each release to the next grant, in µs, without the first `warmUp`. Waits `lateMs` for late messages, and
   * longer for a release that must have been. Rejects when a lock was granted before it was released.
   */
  async latencies(warmUp, lateMs) {
    const latest = Math.max(...this.got)
    await sleep(lateMs)
    const until = (times) => times.filter((at) => at <= latest).length
    const end = performance.now() + LONGEST_LATE_MS
    while (until(this.releasing) < until(this.got) - 1 && performance.now() < end) await sleep(10)
    const events = [
      ...this.got.map((at) => ({ at, isRelease: false })),
      ...this.releasing.map((at) => ({ at, isRelease: true })),
    ]
    const ordered = events.filter(({ at }) => at <= latest).sort((one, other) => one.at - other.at)
    const pairs = ordered.slice(1).map((event, index) => [ordered[index], event])
    if (pairs.some(([before, after]) => before.isRelease === after.isRelease))
      throw new Error(`${this.#processes[0].name}: the lock had two holders`)
    return pairs
      .filter(([before]) => before.isRelease)
      .map(([before, after]) => after.at - before.at)
      .slice(warmUp)
  }

  async end() {
    this.#hasEnded = true
    await Promise.all(this.#processes.map((each) => each.kill()))
  }
}
