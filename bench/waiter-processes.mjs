// The waiter processes of one contender: all waiters acquire the same lock, one after the other.
import { fork } from 'node:child_process'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'

/** How long a lock is held, in milliseconds. */
export const HOLD = { leastMs: 4, mostMs: 8 }
export const FOR_EVER = { leastMs: 600_000, mostMs: 600_000 }

export class WaiterProcesses {
  #children
  #isOver = false
  got = []
  releasing = []

  static async start(url, { module, retryMs }, count) {
    const processes = new WaiterProcesses()
    const script = fileURLToPath(new URL('waiter.mjs', import.meta.url))
    processes.#children = Array.from({ length: count }, () => fork(script, [module, url, `${retryMs ?? ''}`]))
    await Promise.all(
      processes.#children.map(
        (child) =>
          new Promise((ready, failed) =>
            child.once('message', ready).once('exit', (code) => failed(new Error(`${module} ended with ${code}`))),
          ),
      ),
    )
    for (const child of processes.#children) {
      child.removeAllListeners('exit').on('message', ({ got, releasing }) => processes.#receive(child, got, releasing))
      child.on('exit', () => processes.#isOver || console.error(`a process of ${module} has ended unexpectedly`))
    }
    return processes
  }

  /** The releasing process waits again once the next holder has the lock, so that the number of waiters is constant. */
  #receive(child, got, releasing) {
    if (got) {
      this.got.push(got)
      this.#again?.send(HOLD)
      this.#again = undefined
    } else {
      this.releasing.push(releasing)
      if (this.got.length > this.releasing.length) child.send(HOLD)
      else this.#again = child
    }
  }

  #again

  join(count, hold = HOLD) {
    for (let index = 0; index < count; index++) this.#children[index % this.#children.length].send(hold)
  }

  /** Waits for `count` more hand-offs, at most for `longestMs`. Resolves to their number. */
  async handOffs(count, longestMs) {
    const [before, end] = [this.got.length, performance.now() + longestMs]
    while (this.got.length < before + count && performance.now() < end) await sleep(2)
    return this.got.length - before
  }

  /** Lists the times from each release to the next grant, in µs, without the first `warmUp`. Waits `lateMs` for late messages. */
  async latencies(warmUp, lateMs) {
    const latest = Math.max(...this.got)
    await sleep(lateMs)
    const events = [
      ...this.got.map((at) => ({ at, isRelease: false })),
      ...this.releasing.map((at) => ({ at, isRelease: true })),
    ]
    const ordered = events.filter(({ at }) => at <= latest).sort((one, other) => one.at - other.at)
    const pairs = ordered.slice(1).map((event, index) => [ordered[index], event])
    return pairs
      .filter(([before, after]) => before.isRelease && !after.isRelease)
      .map(([before, after]) => after.at - before.at)
      .slice(warmUp)
  }

  async end() {
    this.#isOver = true
    await Promise.all(this.#children.map((child) => new Promise((ended) => child.once('exit', ended).kill('SIGKILL'))))
  }
}
