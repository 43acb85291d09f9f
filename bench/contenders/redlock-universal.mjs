// redlock-universal on ioredis: its lean lock on one node, its Redlock on several nodes.
import { createLock, createRedlock, IoredisAdapter } from 'redlock-universal'
import { HELD_TTL_MS } from '../driver-lock.mjs'
import { openClients, settingsOf } from '../ioredis-clients.mjs'

export const kind = 'library'
export const packages = ['redlock-universal', 'ioredis']
export const does =
  'owner check, in the lean mode by a token of the time and `Math.random`; no fencing token; renews in `using` only, on the event loop'
export const settings = settingsOf(
  'redlock-universal',
  '`createLock` in the mode `lean`, its fastest; `createRedlock` on a quorum; on ioredis, `retryAttempts: 0`',
)

export async function connect(target, variant) {
  const clients = openClients(target, variant)
  // Its type does not name ioredis' Cluster, with which it works.
  const adapters = clients.map((client) => new IoredisAdapter(/** @type {any} */ (client)))
  const once = { ttl: 30_000, retryAttempts: 0 }
  const lockOf = (key, how = once) =>
    adapters.length === 1
      ? createLock({ adapter: adapters[0], key, performance: 'lean', ...how })
      : createRedlock({ adapters, key, ...how })
  return {
    async pair(name) {
      const lock = lockOf(name)
      if (!(await lock.release(await lock.acquire()))) throw new Error(`${name} was lost`)
    },
    take: (name) => lockOf(name, { ...once, ttl: HELD_TTL_MS }).acquire(),
    async tryHeld(name) {
      await lockOf(name)
        .acquire()
        .then(
          () => {
            throw new Error(`${name} was not busy`)
          },
          (error) => {
            if (error.cause?.message !== 'Lock already held') throw error
          },
        )
    },
    close: () => Promise.all(clients.map((client) => client.quit())),
  }
}
