// Defines the functions, collections and the service that the examples assume. Then runs the example, and reports its effects.
import { randomBytes } from 'node:crypto'
import { writeFileSync } from 'node:fs'
import { Server } from 'node:http'
import { createRequire } from 'node:module'
import { setTimeout as sleep } from 'node:timers/promises'
import { pathToFileURL } from 'node:url'

const {
  README_FILE = '',
  README_TIMES,
  README_REPORT = '',
  README_ROOT,
  README_FENCE = '0',
  HOLDFAST_TEST_MONGODB_URL,
} = process.env
/** A separate database, and the package of the reader's driver. */
const { README_MONGODB_URL, README_DRIVER = 'mongodb' } = process.env
const { LockService } = createRequire(README_FILE)('holdfast')
const did = {
  sendReport: 0,
  makeReport: 0,
  placeOrder: 0,
  charge: /** @type {object[]} */ ([]),
  reports: 0,
  balance: 100,
  saved: /** @type {unknown[]} */ ([]),
  migrated: /** @type {unknown[]} */ ([]),
  calls: 0,
  calling: 0,
  mostCalls: 0,
}

/** The part of a MongoDB collection that the examples need. */
function collection() {
  const documents = new Map()
  return {
    documents,
    findOne: async ({ _id }) => documents.get(_id) ?? null,
    async insertOne(document) {
      if (documents.has(document._id)) throw Object.assign(new Error('duplicate key'), { code: 11000 })
      documents.set(document._id, document)
    },
    deleteOne: async ({ _id }) => ({ deletedCount: Number(documents.delete(_id)) }),
    async updateOne({ _id, fence: { $lte } }, { $set }) {
      const found = documents.get(_id)
      if (!found || found.fence > $lte) return { matchedCount: 0 }
      Object.assign(found, $set)
      return { matchedCount: 1 }
    },
  }
}

// The real driver where there is a server: the example depends on how it stores a bigint.
const mongo = HOLDFAST_TEST_MONGODB_URL
  ? await (await import('mongodb')).MongoClient.connect(HOLDFAST_TEST_MONGODB_URL)
  : undefined
/** @type {any} */
const accounts = mongo ? mongo.db().collection(`readme_${randomBytes(6).toString('hex')}`) : collection()
await accounts.insertOne({ _id: 7, balance: 100, fence: BigInt(README_FENCE) })
const reports = collection()

/** Connects to the database of this run, whatever name the example uses. */
async function connectClient() {
  if (!README_MONGODB_URL) return { db: () => ({ collection }), close: async () => {} }
  const driver = createRequire(`${README_ROOT}/bench/package.json`)(README_DRIVER)
  const own = await driver.MongoClient.connect(
    README_MONGODB_URL,
    README_DRIVER === 'mongodb' ? {} : { useUnifiedTopology: true },
  )
  return { db: () => own.db(), close: () => own.close() }
}
const client = await connectClient()
const locks = await LockService.connect('memory:')

Object.assign(globalThis, {
  LockService,
  locks,
  accounts,
  reports,
  client,
  sendReport: async () => void did.sendReport++,
  makeReport: async () => `report ${++did.makeReport}`,
  placeOrder: async () => void did.placeOrder++,
  rows: [1, 2, 3],
  save: async (row) => void did.saved.push(row),
  pending: async () => ['001', '002'].filter((migration) => !did.migrated.includes(migration)),
  migrate: async (migration) => void did.migrated.push(migration),
  callModel: async (question, { signal }) => {
    signal.throwIfAborted()
    did.calls++
    did.mostCalls = Math.max(did.mostCalls, ++did.calling)
    await sleep(10)
    did.calling--
    return `answer to ${question}`
  },
  // The leader of an example works until the process is asked to end.
  runNextTask: async () => {
    did.tasks = (did.tasks ?? 0) + 1
    process.emit('SIGTERM')
  },
  runScheduler: (signal) => new Promise((resolve) => signal.addEventListener('abort', resolve)),
  server: { close() {} },
  // What the examples of the doc comments assume.
  lock: await locks.acquire('example'),
  createReport: async () => void did.makeReport++,
  sendInvoice: async () => {},
  channel: { send() {} },
  charge: async (order, { signal, fencingToken }) => {
    did.charge.push({ order, aborted: signal.aborted, token: String(fencingToken) })
    return 'receipt'
  },
})

// The server of an example does not keep the process alive.
const { listen } = Server.prototype
Server.prototype.listen = /** @type {any} */ (
  /** @this {Server} */ function (...args) {
    return Reflect.apply(listen, this, args).unref()
  }
)

try {
  for (let i = 0; i < Number(README_TIMES); i++) await import(`${pathToFileURL(README_FILE)}?${i}`)
  did.reports = reports.documents.size
  did.balance = (await accounts.findOne({ _id: 7 })).balance
} finally {
  if (mongo) await accounts.drop()
  await mongo?.close()
  await client.close()
  await locks.close()
}
writeFileSync(README_REPORT, JSON.stringify(did))
