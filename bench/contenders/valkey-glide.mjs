// Valkey GLIDE, whose core is Rust, with `SET NX PX` and a compare-and-delete script that the client loads once, without a lock
// library.
import { GlideClient, Script, TimeUnit } from '@valkey/valkey-glide'
import { FREE, driverLock } from '../driver-lock.mjs'

export const kind = 'driver'
export const packages = ['@valkey/valkey-glide']
export const does = 'owner check; no fencing token, no renewal'
export const settings = {
  '': '`SET NX PX`, and `EVALSHA` of a compare-and-delete (`Script`); `inflightRequestsLimit` above its 1000, which 1024 in flight exceed',
}

export async function connect({ urls: [url] }) {
  const { hostname, port } = new URL(url)
  const addresses = [{ host: hostname, port: Number(port) }]
  // By default its requests time out after 250 ms, which a busy machine exceeds without a fault.
  const client = await GlideClient.createClient({ addresses, inflightRequestsLimit: 10_000, requestTimeout: 5000 })
  const free = new Script(FREE)
  const acquire = async (name, token, ttlMs) => {
    const expiry = { type: TimeUnit.Milliseconds, count: ttlMs }
    return (await client.set(name, token, { conditionalSet: 'onlyIfDoesNotExist', expiry })) === 'OK'
  }
  return driverLock({
    acquire,
    free: (name, token) => client.invokeScript(free, { keys: [name], args: [token] }),
    close: () => client.close(),
  })
}
