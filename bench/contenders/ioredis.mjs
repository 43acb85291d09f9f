// The floor: plain ioredis, `SET NX PX` and a compare-and-delete script, no library.
import { randomBytes } from 'node:crypto'
import Redis from 'ioredis'

export const does = 'owner check; no fencing token'

export async function connect(url) {
  const redis = new Redis(url)
  redis.defineCommand('free', {
    numberOfKeys: 1,
    lua: "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0",
  })
  return {
    async pair(name) {
      const token = randomBytes(16).toString('hex')
      if ((await redis.set(name, token, 'PX', 30_000, 'NX')) !== 'OK') throw new Error(`${name} was busy`)
      if ((await redis.free(name, token)) !== 1) throw new Error(`${name} was lost`)
    },
    async tryHeld(name) {
      if ((await redis.set(name, 'another', 'PX', 30_000, 'NX')) === 'OK') throw new Error(`${name} was not busy`)
    },
    close: () => redis.quit(),
  }
}
