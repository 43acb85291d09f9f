// Waiters in several real processes, whose order of arrival is forced and whose order of service is written down.
import assert from 'node:assert/strict'
import { readdir, readFile } from 'node:fs/promises'
import Redis from 'ioredis'
import { start } from './children/start.mjs'
import { random } from './stores.mjs'
import { sleep, until } from './tools.mjs'

/** Like `{ url, options }` of a store of kind `redis`, for `t` to use. */
export class Crowd {
  #t
  #store
  #log = `crowd:${random()}`

  constructor(t, { url, options }) {
    this.#t = t
    this.#store = { url, options }
    /** Another tool's connection. */
    this.redis = new Redis(url, { maxRetriesPerRequest: null })
    this.redis.on('error', () => {})
    t.after(async () => {
      const cleared = this.redis.del(this.#log, `${this.#log}:inside`).catch(() => {})
      await Promise.race([cleared, new Promise((resolve) => setTimeout(resolve, 1000))])
      this.redis.disconnect()
    })
  }

  /** Starts processes that are ready to wait. */
  async processes(count) {
    const children = Array.from({ length: count }, () => start(this.#t, 'crowd', { ...this.#store, log: this.#log }))
    for (const child of children) await child.next('ready')
    return children
  }

  /** One more waiter in a process, `as` what it will write down. When this returns, it has its place in the queue. */
  async enqueue(child, as, options) {
    const before = (await this.places()).length
    child.tell(JSON.stringify({ verb: 'wait', as, name: 'n', ...options }))
    await child.next('waiting')
    assert.equal((await this.places()).length, before + 1, 'its place is the last one')
  }

  key(name = 'n') {
    return `${this.#store.options.keyPrefix}${name}`
  }

  queueKey(name) {
    return `holdfast:queue:{${this.key(name)}}`
  }

  /** The places in the queue of a name, first to last. */
  places(name) {
    return this.redis.zrangebyscore(this.queueKey(name), 0, '+inf')
  }

  /** Who was served so far, in this order. */
  served() {
    return this.redis.lrange(this.#log, 0, -1)
  }

  /** Waits until all of `expected` were served, in this order, and the last one has released unless it still `holds`. */
  async serves(expected, { holds = false } = {}) {
    const enough = async () => (await this.redis.llen(this.#log)) >= expected.length
    try {
      await until('everybody is served', enough)
    } finally {
      assert.deepEqual(await this.served(), expected.slice(0, await this.redis.llen(this.#log)))
    }
    assert.deepEqual(await this.served(), expected)
    if (!holds) await until('the last one has released', async () => (await this.redis.exists(this.key())) === 0)
  }

  /** Nobody holds `n` or waits for it, and nothing is left of those who did. */
  async isOver() {
    await until('the queue is gone', async () => (await this.redis.exists(this.key(), this.queueKey())) === 0)
  }
}

/** `count` names that say where they come from: `a0`, `a1`, … */
export const named = (letter, count) => Array.from({ length: count }, (_, index) => `${letter}${index}`)

/** Stops a process, and waits until none of its threads goes on. Only Linux tells of every thread. */
export async function standStill(child) {
  child.kill('SIGSTOP')
  const folder = `/proc/${child.pid}/task`
  const threads = await readdir(folder).catch(() => null)
  if (!threads) return sleep(500)
  const isStopped = async (thread) => /.*\) T/s.test(await readFile(`${folder}/${thread}/stat`, 'utf8').catch(() => ') T'))
  await until('it stands still', async () => (await Promise.all(threads.map(isStopped))).every(Boolean))
}
