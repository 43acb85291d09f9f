// Plain node-redis, `SET NX PX` and a compare-and-delete script that the client loads once, no library.
import { randomBytes } from 'node:crypto'
import { createClient, defineScript } from 'redis'
import { TAKEN_MS } from '../taken.mjs'

export const kind = 'driver'
export const packages = ['redis']
export const does = 'owner check; no fencing token, no renewal'
export const setting = '`SET NX PX`, and `EVALSHA` of a compare-and-delete (`defineScript`); one connection'

const free = defineScript({
  SCRIPT: "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0",
  NUMBER_OF_KEYS: 1,
  parseCommand(parser, name, token) {
    parser.pushKey(name)
    parser.push(token)
  },
  transformReply: undefined,
})

export async function connect(url) {
  const redis = await createClient({ url, scripts: { free } }).connect()
  const acquire = async (name, token, ttlMs) =>
    (await redis.set(name, token, { condition: 'NX', expiration: { type: 'PX', value: ttlMs } })) === 'OK'
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
    close: () => redis.close(),
  }
}
