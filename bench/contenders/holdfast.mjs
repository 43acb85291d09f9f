// holdfast itself: owner check, fencing token, expiry by the store's clock.
import { subscribe, tracingChannel } from 'node:diagnostics_channel'
import { createRequire } from 'node:module'
import { HELD_TTL_MS } from '../driver-lock.mjs'

// The gates compare two builds, each with its own `index.js`.
const { LockService } = createRequire(import.meta.url)(process.env.HOLDFAST_BENCH_INDEX ?? '../../index.js')

export const kind = 'library'
export const packages = []
export const does = 'owner check, fencing token; renews off the event loop (not in the pairs)'
export const settings = {
  '': '`acquire` and `release()`, default options',
  using: '`using(name, async () => {})`, default options',
  observed: '`using(name, async () => {})`, with a subscriber of every event and call',
  options: '`acquire(name, { ttlMs, waitMs })` and `release()`',
  new: '`acquire` and `release()`, a new name for each pair',
  lock: '`acquireLock` and `releaseLock`, default options',
}
export const holds = 'acquire'

/** The pairs, by the way in which they are called. */
const PAIRS = {
  '': (locks) => async (name) => released(name, await locks.acquire(name)),
  using: (locks) => (name) => locks.using(name, async () => {}),
  observed: (locks) => (name) => locks.using(name, async () => {}),
  options: (locks) => async (name) => released(name, await locks.acquire(name, { ttlMs: 30_000, waitMs: 5_000 })),
  new: (locks) => {
    let count = 0
    return async (name) => {
      const fresh = `${name}:${count++}`
      await released(fresh, await locks.acquire(fresh))
    }
  },
  lock: (locks) => async (name) => {
    if (!(await locks.acquireLock(name, 30))) throw new Error(`${name} was busy`)
    if (!(await locks.releaseLock(name))) throw new Error(`${name} was lost`)
  },
}

/** Subscribes to all messages. It must be called before `connect`. */
function observe() {
  const ignore = () => {}
  for (const type of ['acquired', 'released', 'renewed', 'lost', 'waiting', 'timeout', 'aborted', 'failed'])
    subscribe(`holdfast:${type}`, ignore)
  for (const kind of ['acquire', 'using'])
    tracingChannel(`holdfast:${kind}`).subscribe(/** @type {any} */ ({ start: ignore, asyncEnd: ignore }))
}

async function released(name, lock) {
  if (!(await lock.release())) throw new Error(`${name} was lost`)
}

export async function connect({ urls, caFile, keyPrefix }, variant) {
  if (variant === 'observed') observe()
  const options = { ...(caFile && { tls: { caFile } }), ...(keyPrefix && { keyPrefix }) }
  const locks = await LockService.connect(urls.length === 1 ? urls[0] : urls, options)
  return {
    pair: PAIRS[variant](locks),
    async take(name) {
      if (!(await locks.acquireLock(name, HELD_TTL_MS / 1000))) throw new Error(`${name} was busy`)
    },
    async tryHeld(name) {
      if (await locks.acquireLock(name, 30)) throw new Error(`${name} was not busy`)
    },
    hold: (name, ttlMs) => locks.acquire(name, { ttlMs, waitMs: 0 }),
    async wait(name) {
      const lock = await locks.acquire(name, { waitMs: Infinity })
      return () => lock.release()
    },
    using: (name, work) => locks.using(name, work),
    lost: () => locks.stats().lost,
    close: () => locks.close(),
  }
}
