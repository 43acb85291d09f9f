// Waiters in several processes. The test controls their order of arrival, and records the order in which they are served.
import assert from 'node:assert/strict'
import { isStopped } from '../scripts/servers.mjs'
import { start } from './children/start.mjs'
import { openRecorder, RedisRecorder } from './store-recorder.mjs'
import { random } from './stores.mjs'
import { until } from './tools.mjs'

/** The waiter processes of the test `t`, on a store `{ url, options }` that keeps queues. */
export class WaiterProcesses {
  #t
  #task

  constructor(t, { url, options }) {
    this.#t = t
    this.#task = { url, options, log: `waiters_${random()}` }
    this.recorder = openRecorder(this.#task)
    t.after(() => this.recorder.close())
  }

  /** The recorder of a store on Redis. */
  get redis() {
    assert.ok(this.recorder instanceof RedisRecorder)
    return this.recorder
  }

  /** Starts processes that are ready to wait. */
  async processes(count) {
    const children = Array.from({ length: count }, () => start(this.#t, 'recording-waiter', this.#task))
    for (const child of children) await child.next('ready')
    return children
  }

  /** Starts `each` waiters for `n` in each of `count` processes, alternately. Resolves to their labels in this order. */
  async gather(count, each, options = {}) {
    const children = await this.processes(count)
    const expected = labels('w', count * each)
    for (const [index, label] of expected.entries()) await this.enqueue(children[index % count], label, options)
    return expected
  }

  /** Starts one more waiter in a process. It records `label` when it is served. Resolves once it has its position in the queue. */
  async enqueue(child, label, options) {
    const before = (await this.positions()).length
    child.send(JSON.stringify({ verb: 'wait', label, name: 'n', ...options }))
    await child.next('waiting')
    assert.equal((await this.positions()).length, before + 1, 'it has the last position')
  }

  /** Lists the positions in the queue of `n`, first to last. */
  positions() {
    return this.recorder.positions('n')
  }

  /** Lists the labels of the waiters that were served so far, in this order. */
  served() {
    return this.recorder.records()
  }

  /** Waits until all of `expected` were served in this order, and the last one has released the lock unless it still `holds` it. */
  async assertServed(expected, { holds = false } = {}) {
    const enough = async () => (await this.served()).length >= expected.length
    try {
      await until('all waiters are served', enough, 15_000 + 500 * expected.length)
    } finally {
      const served = await this.served()
      assert.deepEqual(served, expected.slice(0, served.length))
    }
    assert.deepEqual(await this.served(), expected)
    if (!holds) await until('the last one has released', () => this.recorder.isFree('n'))
  }

  /** Waits until `n` has no holder, no waiter, and nothing in the store. */
  async assertUnused() {
    await until('the queue is removed', () => this.recorder.isUnused('n'))
  }
}

/** Returns `count` labels of the waiters of one process: `a0`, `a1`, … */
export const labels = (letter, count) => Array.from({ length: count }, (_, index) => `${letter}${index}`)

/** Suspends a process, and waits until all of its threads have stopped. */
export async function suspend(child) {
  child.kill('SIGSTOP')
  await until('all threads have stopped', () => isStopped(child.pid))
}
