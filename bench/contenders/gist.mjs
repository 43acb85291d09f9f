// The gist on the official MongoDB driver: an insert, and a delete by name.
import { MongoClient } from 'mongodb'
import { poll } from '../poll.mjs'

export const does = 'no owner check, no fencing token, expiry by the client’s clock'

export async function connect(url) {
  const client = await new MongoClient(url).connect()
  const locks = client.db().collection('locks')
  await locks.createIndex({ expiresAt: 1 }, { expireAfterSeconds: 0 })
  const acquire = async (name) => {
    try {
      await locks.insertOne({ _id: name, expiresAt: new Date(Date.now() + 30_000) })
      return true
    } catch (error) {
      if (error.code === 11000) return false
      throw error
    }
  }
  return {
    async pair(name) {
      if (!(await acquire(name))) throw new Error(`${name} was busy`)
      await locks.deleteOne({ _id: name })
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
