// Starts a waiter on each request. Each waiter that is served records its label in the store while it holds the lock, and
// checks that it is the only holder.
import { openRecorder } from '../store-recorder.mjs'
import { open, requests, report, task } from './child.mjs'

const aborts = new Map()
const ends = new Map()
const locks = await open({ onEvent: ({ type }) => type === 'waiting' && report({ waiting: true }) })
const recorder = openRecorder(task)

/** `holds`: holds the name until the request `end`. */
async function wait({ label, name, holdMs = 0, holds = false, ...options }) {
  const abort = new AbortController()
  aborts.set(label, abort)
  const ended = new Promise((resolve) => ends.set(label, resolve))
  try {
    const lock = await locks.acquire(name, { ttlMs: 60_000, waitMs: 60_000, signal: abort.signal, ...options })
    const inside = await recorder.enter(label)
    if (inside !== 1) await recorder.record(`${inside} at once`)
    if (holds) await ended
    if (holdMs > 0) await new Promise((resolve) => setTimeout(resolve, holdMs))
    await recorder.leave()
    if (!(await lock.release())) await recorder.record(`${label} had lost it`)
    report({ served: label })
  } catch (error) {
    report({ failed: { label, code: error.code ?? error.message } })
  }
}

const verbs = {
  wait,
  end: ({ label }) => ends.get(label)(),
  abort: ({ label }) => aborts.get(label).abort(new Error('enough')),
  hold: async ({ name, ...options }) => report({ held: (await locks.acquire(name, options)).fencingToken }),
  close: async () => report({ closed: (await locks.close()) ?? true }),
}
report({ ready: true })
for await (const line of requests()) {
  const { verb, ...order } = JSON.parse(line)
  verbs[verb](order)
}
process.exit()
