// mongodb-lock on the newest driver that it works with: it needs results that drivers from 4 on do not have, and callbacks,
// which drivers from 5 on do not support. `removeExpired` deletes released locks, which is faster than the default (that keeps all
// locks, and scans them at each release). The pool is as large as that of today's driver.
import { promisify } from 'node:util'
import mongodb from 'mongodb3'
import mongoDbLock from 'mongodb-lock'
import { poll } from '../poll.mjs'
import { HELD_TTL_MS } from '../driver-lock.mjs'

export const kind = 'library'
export const packages = ['mongodb-lock', 'mongodb3']
export const does = 'owner check, expiry by the client’s clock; no fencing token, no renewal'
export const settings = { '': '`removeExpired`, on the newest driver that it works with, with a pool of 100' }

export async function connect({ urls: [url] }) {
  const client = await mongodb.MongoClient.connect(url, {
    useNewUrlParser: true,
    useUnifiedTopology: true,
    poolSize: 100,
  })
  const collection = client.db().collection('mongodb-lock')
  const indexed = mongoDbLock(collection, 'any')
  await promisify(indexed.ensureIndexes.bind(indexed))()
  /** Resolves to a function that releases the lock, or to `null` when the name is busy. */
  const acquire = async (name, timeout = 30_000) => {
    const lock = mongoDbLock(collection, name, { timeout, removeExpired: true })
    const code = await promisify(lock.acquire.bind(lock))()
    return code && (() => promisify(lock.release.bind(lock))(code))
  }
  return {
    async pair(name) {
      const release = await acquire(name)
      if (!release) throw new Error(`${name} was busy`)
      if (!(await release())) throw new Error(`${name} was lost`)
    },
    async take(name) {
      if (!(await acquire(name, HELD_TTL_MS))) throw new Error(`${name} was busy`)
    },
    async tryHeld(name) {
      if (await acquire(name)) throw new Error(`${name} was not busy`)
    },
    wait: (name, retryMs) => poll(() => acquire(name), retryMs),
    close: () => client.close(),
  }
}
