// Waits as often as it is told to. Each waiter that is served writes itself down in the store, while it holds the lock, and
// looks whether it is alone.
import Redis from 'ioredis'
import { open, orders, say, task } from './kit.mjs'

const aborts = new Map()
const locks = await open({ onEvent: ({ type }) => type === 'waiting' && say({ waiting: true }) })
const redis = new Redis(task.url)

async function wait({ as, name, holdMs = 0, ...options }) {
  const abort = new AbortController()
  aborts.set(as, abort)
  try {
    const lock = await locks.acquire(name, { ttlMs: 60_000, waitMs: 60_000, signal: abort.signal, ...options })
    const [[, inside]] = await redis.multi().incr(`${task.log}:inside`).rpush(task.log, as).exec()
    if (inside !== 1) await redis.rpush(task.log, `${inside} at once`)
    if (holdMs > 0) await new Promise((resolve) => setTimeout(resolve, holdMs))
    await redis.decr(`${task.log}:inside`)
    if (!(await lock.release())) await redis.rpush(task.log, `${as} had lost it`)
    say({ served: as })
  } catch (error) {
    say({ gaveUp: { as, code: error.code ?? error.message } })
  }
}

const verbs = {
  wait,
  abort: ({ as }) => aborts.get(as).abort(new Error('enough')),
  hold: async ({ name, ...options }) => say({ held: (await locks.acquire(name, options)).fencingToken }),
  close: async () => say({ closed: await locks.close() ?? true }),
}
say({ ready: true })
for await (const line of orders()) {
  const { verb, ...order } = JSON.parse(line)
  verbs[verb](order)
}
process.exit()
