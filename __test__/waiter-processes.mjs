// Waiters in several real processes, whose order of arrival is forced and whose order of service is written down.
import assert from 'node:assert/strict'
import { readdir, readFile } from 'node:fs/promises'
import { start } from './children/start.mjs'
import { openRecorder } from './store-recorder.mjs'
import { random } from './stores.mjs'
import { sleep, until } from './tools.mjs'

/** On a store `{ url, options }` that keeps queues, for `t` to use. */
export class WaiterProcesses {
  #t
  #order

  constructor(t, { url, options }) {
    this.#t = t
    this.#order = { url, options, log: `crowd_${random()}` }
    this.ledger = openRecorder(this.#order)
    t.after(() => this.ledger.close())
  }

  /** Starts processes that are ready to wait. */
  async processes(count) {
    const children = Array.from({ length: count }, () => start(this.#t, 'recording-waiter', this.#order))
    for (const child of children) await child.next('ready')
    return children
  }

  /** One more waiter in a process, `as` what it will write down. When this returns, it has its place in the queue. */
  async enqueue(child, as, options) {
    const before = (await this.places()).length
    child.send(JSON.stringify({ verb: 'wait', as, name: 'n', ...options }))
    await child.next('waiting')
    assert.equal((await this.places()).length, before + 1, 'its place is the last one')
  }

  /** The places in the queue of `n`, first to last. */
  places() {
    return this.ledger.places('n')
  }

  /** Who was served so far, in this order. */
  served() {
    return this.ledger.lines()
  }

  /** Waits until all of `expected` were served, in this order, and the last one has released unless it still `holds`. */
  async serves(expected, { holds = false } = {}) {
    const enough = async () => (await this.served()).length >= expected.length
    try {
      await until('everybody is served', enough)
    } finally {
      const served = await this.served()
      assert.deepEqual(served, expected.slice(0, served.length))
    }
    assert.deepEqual(await this.served(), expected)
    if (!holds) await until('the last one has released', () => this.ledger.isFree('n'))
  }

  /** Nobody holds `n` or waits for it, and nothing is left of those who did. */
  async isOver() {
    await until('the queue is gone', () => this.ledger.isOver('n'))
  }
}

/** `count` names that say where they come from: `a0`, `a1`, … */
export const named = (letter, count) => Array.from({ length: count }, (_, index) => `${letter}${index}`)

/** Stops a process, and waits until none of its threads goes on. Only Linux tells of every thread. */
export async function suspend(child) {
  child.kill('SIGSTOP')
  const folder = `/proc/${child.pid}/task`
  const threads = await readdir(folder).catch(() => null)
  if (!threads) return sleep(500)
  const isStopped = async (thread) => /.*\) T/s.test(await readFile(`${folder}/${thread}/stat`, 'utf8').catch(() => ') T'))
  await until('it stands still', async () => (await Promise.all(threads.map(isStopped))).every(Boolean))
}
