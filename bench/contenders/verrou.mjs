// verrou on its Redis driver.
import { Verrou } from '@verrou/core'
import { redisStore } from '@verrou/core/drivers/redis'
import { HELD_TTL_MS } from '../driver-lock.mjs'
import { openClients, settingsOf } from '../ioredis-clients.mjs'

export const kind = 'library'
export const packages = ['@verrou/core', 'ioredis']
export const does = 'owner check, by a token of `Math.random`; no fencing token, no renewal'
export const settings = settingsOf(
  'verrou',
  '`acquireImmediately`, one try; its release sends the whole script each time (`EVAL`)',
)

export async function connect(target, variant) {
  /** @type {any[]} Its type does not name ioredis' Cluster, with which it works. */
  const [redis] = openClients(target, variant)
  const verrou = new Verrou({ default: 'redis', stores: { redis: { driver: redisStore({ connection: redis }) } } })
  return {
    async pair(name) {
      const lock = verrou.createLock(name, 30_000)
      if (!(await lock.acquireImmediately())) throw new Error(`${name} was busy`)
      // Throws when the lock was lost.
      await lock.release()
    },
    async take(name) {
      if (!(await verrou.createLock(name, HELD_TTL_MS).acquireImmediately())) throw new Error(`${name} was busy`)
    },
    async tryHeld(name) {
      if (await verrou.createLock(name, 30_000).acquireImmediately()) throw new Error(`${name} was not busy`)
    },
    async wait(name, retryMs) {
      const lock = verrou.createLock(name, 30_000)
      if (!(await lock.acquire(retryMs === undefined ? {} : { retry: { delay: retryMs } })))
        throw new Error(`${name}: timed out`)
      return () => lock.release()
    },
    close: () => redis.quit(),
  }
}
