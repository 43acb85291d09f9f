// The floor: plain ioredis, `SET NX PX` and a compare-and-delete script, no library.
import { randomBytes } from 'node:crypto'
import Redis from 'ioredis'
import { TAKEN_MS } from '../taken.mjs'

export const kind = 'driver'
export const packages = ['ioredis']
export const does = 'owner check; no fencing token, no renewal'
export const setting = '`SET NX PX`, and `EVALSHA` of a compare-and-delete; one connection'

export const connect = (url) => connectWith({}, url)

/** `options` are those of ioredis. */
export async function connectWith(options, url) {
  const redis = new Redis(url, options)
  redis.defineCommand('free', {
    numberOfKeys: 1,
    lua: "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0",
  })
  const acquire = async (name, token, ttlMs) => (await redis.set(name, token, 'PX', ttlMs, 'NX')) === 'OK'
  const newToken = () => randomBytes(16).toString('hex')
  return {
    async pair(name) {
      const token = newToken()
      if (!(await acquire(name, token, 30_000))) throw new Error(`${name} was busy`)
      if ((await redis.free(name, token)) !== 1) throw new Error(`${name} was lost`)
    },
    async take(name) {
      if (!(await acquire(name, newToken(), TAKEN_MS))) throw new Error(`${name} was busy`)
    },
    async tryHeld(name) {
      if (await acquire(name, newToken(), 30_000)) throw new Error(`${name} was not busy`)
    },
    close: () => redis.quit(),
  }
}
