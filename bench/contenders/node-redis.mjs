// node-redis with `SET NX PX` and a compare-and-delete script that the client loads once, without a lock library.
import { createClient, defineScript } from 'redis'
import { FREE, driverLock } from '../driver-lock.mjs'

export const kind = 'driver'
export const packages = ['redis']
export const does = 'owner check; no fencing token, no renewal'
export const settings = { '': '`SET NX PX`, and `EVALSHA` of a compare-and-delete (`defineScript`); one connection' }

const free = defineScript({
  SCRIPT: FREE,
  NUMBER_OF_KEYS: 1,
  parseCommand(parser, name, token) {
    parser.pushKey(name)
    parser.push(token)
  },
  // The reply stays as it is.
  transformReply: /** @type {any} */ (undefined),
})

export async function connect({ urls: [url] }) {
  /** @type {any} With the script `free`. */
  const redis = await createClient({ url, scripts: { free } }).connect()
  const acquire = async (name, token, ttlMs) =>
    (await redis.set(name, token, { condition: 'NX', expiration: { type: 'PX', value: ttlMs } })) === 'OK'
  return driverLock({ acquire, free: (name, token) => redis.free(name, token), close: () => redis.close() })
}
