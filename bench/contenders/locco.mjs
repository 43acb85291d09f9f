// @kontsedal/locco on its MongoDB adapter, for hand-offs only. It has no default pause between attempts; the examples in its
// documentation use 200 ms. Its ES module cannot be imported (its imports lack extensions).
import { createRequire } from 'node:module'
import { MongoClient } from 'mongodb'

export const packages = ['@kontsedal/locco', 'mongodb']

const { Locker, MongoAdapter } = createRequire(import.meta.url)('@kontsedal/locco')

export async function connect({ urls: [url] }) {
  const client = await new MongoClient(url).connect()
  const adapter = new MongoAdapter({ client })
  return {
    async wait(name, retryMs = 200) {
      const locker = new Locker({
        adapter,
        retrySettings: { retryDelay: retryMs, retryTimes: Number.MAX_SAFE_INTEGER },
      })
      const lock = await locker.lock(name, 30_000).acquire()
      return () => lock.release({ throwOnFail: true })
    },
    close: () => client.close(),
  }
}
