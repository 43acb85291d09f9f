// Plain Valkey GLIDE, whose core is Rust, `SET NX PX` and a compare-and-delete script that the client loads once, no library.
import { randomBytes } from 'node:crypto'
import { GlideClient, Script, TimeUnit } from '@valkey/valkey-glide'
import { TAKEN_MS } from '../taken.mjs'

export const kind = 'driver'
export const packages = ['@valkey/valkey-glide']
export const does = 'owner check; no fencing token, no renewal'
export const setting =
  '`SET NX PX`, and `EVALSHA` of a compare-and-delete (`Script`); `inflightRequestsLimit` above its 1000, which 1024 in flight exceed'

export async function connect(url) {
  const { hostname, port } = new URL(url)
  const addresses = [{ host: hostname, port: Number(port) }]
  // Its requests give up after 250 ms by default, which a busy machine exceeds with nothing wrong.
  const client = await GlideClient.createClient({ addresses, inflightRequestsLimit: 10_000, requestTimeout: 5000 })
  const free = new Script("if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0")
  const acquire = async (name, token, ttlMs) => {
    const expiry = { type: TimeUnit.Milliseconds, count: ttlMs }
    return (await client.set(name, token, { conditionalSet: 'onlyIfDoesNotExist', expiry })) === 'OK'
  }
  const newToken = () => randomBytes(16).toString('hex')
  return {
    async pair(name) {
      const token = newToken()
      if (!(await acquire(name, token, 30_000))) throw new Error(`${name} was busy`)
      if ((await client.invokeScript(free, { keys: [name], args: [token] })) !== 1) throw new Error(`${name} was lost`)
    },
    async take(name) {
      if (!(await acquire(name, newToken(), TAKEN_MS))) throw new Error(`${name} was busy`)
    },
    async tryHeld(name) {
      if (await acquire(name, newToken(), 30_000)) throw new Error(`${name} was not busy`)
    },
    close: () => client.close(),
  }
}
