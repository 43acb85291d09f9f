// Waits as often as it is told to. Each waiter that is served writes itself down in the store, while it holds the lock, and
// looks whether it is alone.
import { openLedger } from '../ledger.mjs'
import { open, orders, say, task } from './kit.mjs'

const aborts = new Map()
const locks = await open({ onEvent: ({ type }) => type === 'waiting' && say({ waiting: true }) })
const ledger = openLedger(task)

async function wait({ as, name, holdMs = 0, ...options }) {
  const abort = new AbortController()
  aborts.set(as, abort)
  try {
    const lock = await locks.acquire(name, { ttlMs: 60_000, waitMs: 60_000, signal: abort.signal, ...options })
    const inside = await ledger.enter(as)
    if (inside !== 1) await ledger.write(`${inside} at once`)
    if (holdMs > 0) await new Promise((resolve) => setTimeout(resolve, holdMs))
    await ledger.leave()
    if (!(await lock.release())) await ledger.write(`${as} had lost it`)
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
