// holdfast itself: owner check, fencing token, expiry by the store's clock.
import { createRequire } from 'node:module'

const { LockService } = createRequire(import.meta.url)('../../index.js')

export const does = 'owner check, fencing token'
export const holds = 'acquire'

export async function connect(url) {
  const locks = await LockService.connect(url)
  return {
    async pair(name) {
      if (!(await locks.acquireLock(name, 30))) throw new Error(`${name} was busy`)
      if (!(await locks.releaseLock(name))) throw new Error(`${name} was lost`)
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
