// holdfast itself: owner check, fencing token, expiry by the store's clock.
import { createRequire } from 'node:module'
import { HELD_TTL_MS } from '../held-ttl.mjs'

const { LockService } = createRequire(import.meta.url)('../../index.js')

export const kind = 'library'
export const packages = []
export const does = 'owner check, fencing token; renews off the event loop (not in the pairs)'
export const setting = '`acquire` and `release()`, default options'
export const holds = 'acquire'

/** The pairs, by the way in which they are called. */
const PAIRS = {
  acquire: (locks) => async (name) => released(name, await locks.acquire(name)),
  options: (locks) => async (name) => released(name, await locks.acquire(name, { ttlMs: 30_000, waitMs: 5_000 })),
  new: (locks) => {
    let count = 0
    return async (name) => {
      const fresh = `${name}:${count++}`
      await released(fresh, await locks.acquire(fresh))
    }
  },
  using: (locks) => (name) => locks.using(name, async () => {}),
  lock: (locks) => async (name) => {
    if (!(await locks.acquireLock(name, 30))) throw new Error(`${name} was busy`)
    if (!(await locks.releaseLock(name))) throw new Error(`${name} was lost`)
  },
}

async function released(name, lock) {
  if (!(await lock.release())) throw new Error(`${name} was lost`)
}

export const connect = (...urls) => connectWith('acquire', ...urls)

export async function connectWith(way, ...urls) {
  const locks = await LockService.connect(urls.length === 1 ? urls[0] : urls)
  return {
    pair: PAIRS[way](locks),
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
    lost: () => locks.stats().lost,
    close: () => locks.close(),
  }
}
