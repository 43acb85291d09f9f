// The baseline: ioredis with `SET NX PX` and a compare-and-delete script, without a lock library.
import { Redis } from 'ioredis'
import { FREE, driverLock } from '../driver-lock.mjs'

export const kind = 'driver'
export const packages = ['ioredis']
export const does = 'owner check; no fencing token, no renewal'
export const setting = '`SET NX PX`, and `EVALSHA` of a compare-and-delete; one connection'

export const connect = (url) => connectWith({}, url)

/** `options` are those of ioredis. */
export async function connectWith(options, url) {
  /** @type {any} With the command `free`. */
  const redis = new Redis(url, options)
  redis.defineCommand('free', {
    numberOfKeys: 1,
    lua: FREE,
  })
  const acquire = async (name, token, ttlMs) => (await redis.set(name, token, 'PX', ttlMs, 'NX')) === 'OK'
  return driverLock({ acquire, free: (name, token) => redis.free(name, token), close: () => redis.quit() })
}
