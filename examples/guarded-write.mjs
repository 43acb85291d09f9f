// A holder continues after its lease has expired, and its write is refused because of its fencing token.
//
//   node examples/guarded-write.mjs                                   runs in this process, without a server
//   node examples/guarded-write.mjs mongodb://127.0.0.1:27017/test    locks and account in MongoDB (npm install mongodb)
import { setTimeout as sleep } from 'node:timers/promises'
import { LockService } from '../index.js' // 'holdfast' in your project

const url = process.argv[2]
const account = url ? await mongoAccount(url) : memoryAccount()
// Two services, like two instances.
const [slow, quick] = await Promise.all([LockService.connect(url ?? 'memory:'), LockService.connect(url ?? 'memory:')])

// Without renewal, as if this process were suspended.
const stale = await slow.acquire('account:7', { ttlMs: 300, renew: false })
const seen = await account.balance()
console.log(`slow   token ${stale.fencingToken}: reads ${seen}, and is suspended`)
await sleep(600)

const fresh = await quick.acquire('account:7')
const balance = await account.balance()
const written = await account.write(balance - 10, fresh.fencingToken)
const outcome = written ? 'done' : 'refused'
console.log(`quick  token ${fresh.fencingToken}: reads ${balance}, writes ${balance - 10}: ${outcome}`)
await fresh.release()

// It should check `stale.isHeld` first, which is false by now. But the write may arrive at any time after the check, so the
// database has to check, too.
const overwritten = await account.write(seen - 50, stale.fencingToken)
console.log(`slow   token ${stale.fencingToken}: continues, writes ${seen - 50}: ${overwritten ? 'done' : 'refused'}`)
console.log(`the balance is ${await account.balance()}`)

await Promise.all([slow.close(), quick.close(), account.close()])
// 90 is correct; 50 would mean that the first write was lost.
process.exitCode = written && !overwritten ? 0 : 1

/** A row with a guard that every database supports: UPDATE … WHERE fence <= $token. */
function memoryAccount() {
  const row = { balance: 100, fence: 0n }
  return {
    balance: async () => row.balance,
    /** @param {number} balance @param {bigint} fence */
    write: async (balance, fence) => {
      if (row.fence > fence) return false
      Object.assign(row, { balance, fence })
      return true
    },
    close: async () => {},
  }
}

/** @param {string} url */
async function mongoAccount(url) {
  const { Long, MongoClient, ObjectId } = await import('mongodb')
  const client = await MongoClient.connect(url)
  const accounts = client.db().collection('holdfast_example')
  const _id = new ObjectId()
  await accounts.insertOne({ _id, balance: 100, fence: Long.ZERO })
  return {
    balance: async () => (await accounts.findOne({ _id }))?.balance,
    /** @param {number} balance @param {bigint} token */
    write: async (balance, token) => {
      const fence = Long.fromBigInt(token)
      const { matchedCount } = await accounts.updateOne({ _id, fence: { $lte: fence } }, { $set: { balance, fence } })
      return matchedCount === 1
    },
    close: async () => {
      await accounts.deleteOne({ _id })
      await client.close()
    },
  }
}
