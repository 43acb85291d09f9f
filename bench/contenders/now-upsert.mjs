// The best lock in a page of code on the official driver: one findOneAndUpdate by _id, whose pipeline replaces a document that is
// missing or expired by the server's clock, and leaves other documents unchanged; and a delete by owner.
import { randomBytes } from 'node:crypto'
import { MongoClient } from 'mongodb'
import { HELD_TTL_MS } from '../driver-lock.mjs'

export const kind = 'code'
export const packages = ['mongodb']
export const does = 'owner check, expiry by the server’s clock; no fencing token, no renewal'
export const settings = { '': 'a `findOneAndUpdate` with a pipeline on `$$NOW`, and a `deleteOne` by owner' }

const EPOCH = new Date(0)

export async function connect({ urls: [url] }) {
  const client = await new MongoClient(url).connect()
  const locks = client.db().collection('now-upsert')
  await locks.createIndex({ expiresAt: 1 }, { expireAfterSeconds: 0 })
  const acquire = async (name, owner, ttlMs = 30_000) => {
    const isFree = { $lte: [{ $ifNull: ['$expiresAt', EPOCH] }, '$$NOW'] }
    const taken = { _id: '$_id', owner, expiresAt: { $add: ['$$NOW', ttlMs] } }
    const pipeline = [{ $replaceWith: { $cond: [isFree, taken, '$$ROOT'] } }]
    try {
      const found = await locks.findOneAndUpdate({ _id: name }, pipeline, { upsert: true, returnDocument: 'after' })
      return found?.owner === owner
    } catch (error) {
      // Two clients inserted at the same time.
      if (error.code === 11000) return false
      throw error
    }
  }
  const newOwner = () => randomBytes(16).toString('hex')
  return {
    async pair(name) {
      const owner = newOwner()
      if (!(await acquire(name, owner))) throw new Error(`${name} was busy`)
      if ((await locks.deleteOne({ _id: name, owner })).deletedCount !== 1) throw new Error(`${name} was lost`)
    },
    async take(name) {
      if (!(await acquire(name, newOwner(), HELD_TTL_MS))) throw new Error(`${name} was busy`)
    },
    async tryHeld(name) {
      if (await acquire(name, newOwner())) throw new Error(`${name} was not busy`)
    },
    close: () => client.close(),
  }
}
