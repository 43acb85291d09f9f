// The gist on the official MongoDB driver: an insert and a delete by name.
import { MongoClient } from 'mongodb'
import { poll } from '../poll.mjs'
import { HELD_TTL_MS } from '../driver-lock.mjs'

export const kind = 'code'
export const packages = ['mongodb']
export const does = 'no owner check, no fencing token, no renewal, expiry by the client’s clock'
export const settings = { '': 'an `insertOne`, and a `deleteOne` by name' }

export async function connect({ urls: [url] }) {
  const client = await new MongoClient(url).connect()
  const locks = client.db().collection('locks')
  await locks.createIndex({ expiresAt: 1 }, { expireAfterSeconds: 0 })
  const acquire = async (name, ttlMs = 30_000) => {
    try {
      await locks.insertOne({ _id: name, expiresAt: new Date(Date.now() + ttlMs) })
      return true
    } catch (error) {
      if (error.code === 11000) return false
      throw error
    }
  }
  return {
    async pair(name) {
      if (!(await acquire(name))) throw new Error(`${name} was busy`)
      if ((await locks.deleteOne({ _id: name })).deletedCount !== 1) throw new Error(`${name} was lost`)
    },
    async take(name) {
      if (!(await acquire(name, HELD_TTL_MS))) throw new Error(`${name} was busy`)
    },
    async tryHeld(name) {
      if (await acquire(name)) throw new Error(`${name} was not busy`)
    },
    async wait(name, retryMs) {
      await poll(() => acquire(name), retryMs)
      return () => locks.deleteOne({ _id: name })
    },
    close: () => client.close(),
  }
}
