// The baseline: ioredis with `SET NX PX` and a compare-and-delete script, without a lock library.
import { FREE, driverLock } from '../driver-lock.mjs'
import { openClients, settingsOf } from '../ioredis-clients.mjs'

export const kind = 'driver'
export const packages = ['ioredis']
export const does = 'owner check; no fencing token, no renewal'
export const settings = settingsOf(
  'ioredis',
  '`SET NX PX`, and `EVALSHA` of a compare-and-delete; one connection, on a Cluster one per node',
)

export async function connect(target, variant) {
  /** @type {any[]} With the command `free`. */
  const [redis] = openClients(target, variant)
  redis.defineCommand('free', { numberOfKeys: 1, lua: FREE })
  const acquire = async (name, token, ttlMs) => (await redis.set(name, token, 'PX', ttlMs, 'NX')) === 'OK'
  return driverLock({ acquire, free: (name, token) => redis.free(name, token), close: () => redis.quit() })
}
