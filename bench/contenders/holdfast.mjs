// holdfast itself: owner check, fencing token, expiry by the store's clock.
import { createRequire } from 'node:module'
import { HELD_TTL_MS } from '../held-ttl.mjs'

const { LockService } = createRequire(import.meta.url)('../../index.js')

export const kind = 'library'
export const packages = []
export const does = 'owner check, fencing token; renews off the event loop (not in the pairs)'
export const setting = '`acquireLock` and `releaseLock`, default options'
export const holds = 'acquire'

export async function connect(...urls) {
  const locks = await LockService.connect(urls.length === 1 ? urls[0] : urls)
  return {
    async pair(name) {
      if (!(await locks.acquireLock(name, 30))) throw new Error(`${name} was busy`)
      if (!(await locks.releaseLock(name))) throw new Error(`${name} was lost`)
    },
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
