// Waits as often as it is told to. Each waiter that is served writes itself down in the store, while it holds the lock, and
// looks whether it is alone.
import { openRecorder } from '../store-recorder.mjs'
import { open, requests, report, task } from './child.mjs'

const aborts = new Map()
const locks = await open({ onEvent: ({ type }) => type === 'waiting' && report({ waiting: true }) })
const ledger = openRecorder(task)

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
    report({ served: as })
  } catch (error) {
    report({ gaveUp: { as, code: error.code ?? error.message } })
  }
}

const verbs = {
  wait,
  abort: ({ as }) => aborts.get(as).abort(new Error('enough')),
  hold: async ({ name, ...options }) => report({ held: (await locks.acquire(name, options)).fencingToken }),
  close: async () => report({ closed: await locks.close() ?? true }),
}
report({ ready: true })
for await (const line of requests()) {
  const { verb, ...order } = JSON.parse(line)
  verbs[verb](order)
}
process.exit()
