// Runs every block of the pages for services with locks in MongoDB against a real server, together with the packages that they name.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
import { after, before, test } from 'node:test'
import { promisify } from 'node:util'
import vm from 'node:vm'
import { installDependencies } from '../scripts/setup.mjs'
import { withDatabase } from './database.mjs'
import { blocksOf, oneLine, root } from './readme/blocks.mjs'
import { Project } from './readme/run.mjs'
import { missing, suite } from './stores.mjs'
import { rejects } from './tools.mjs'

const DOCUMENTS = ['docs/from/gist.md', 'docs/from/mongodb-lock.md', 'docs/from/locco.md']
const blocks = DOCUMENTS.flatMap(blocksOf)
const packages = createRequire(`${root}/bench/package.json`)

let project
before(() => {
  if (missing('mongodb')) return
  installDependencies('bench')
  project = new Project()
  project.alsoHas('bench', 'mongodb-lock', '@kontsedal/locco')
})
after(() => project?.close())

/** The check of each block, by a text that only this block contains. */
const TESTS = {
  'new DistributedLocks(': async ({ diff, collections }) => {
    const { before, after } = await diff()
    assert.deepEqual([before.did.sendReport, after.did.sendReport], [2, 2])
    // Both versions used one collection, and left it empty.
    assert.deepEqual(await collections(), { mutexes: 0 })
  },
  'renew: true, waitMs': async ({ js }) => assert.equal((await js()).did.sendReport, 1),
  'renew: true }': async ({ js }) => assert.equal((await js()).did.sendReport, 1),
  'standing aside': async ({ js, code }) => {
    assert.equal((await js()).did.sendReport, 1)
    const fails = (name) =>
      `globalThis.locks = { acquireLock: () => Promise.reject(Object.assign(new Error('no'), { code: '${name}' })) }\n`
    const { did, stdout } = await js(fails('LOCK_STORE') + code)
    assert.deepEqual([did.sendReport, stdout], [0, 'the lock store is down: standing aside\n'])
    await assert.rejects(js(fails('LOCK_CLOSED') + code), /LOCK_CLOSED/)
  },
  'code 85': (given) => assertMessage(given, { expiresAt: 1 }, { expireAfterSeconds: 3600 }),
  collMod: (given) => assertRemedy(given, { expiresAt: 1 }, { expireAfterSeconds: 3600 }),
  'code 86': (given) => assertMessage(given, { until: 1 }, { name: 'expiresAt_1' }),
  dropIndex: (given) => assertRemedy(given, { until: 1 }, { name: 'expiresAt_1' }),
  '-import mongoDbLock': async ({ diff, collections }) => {
    const { before, after } = await diff({ README_DRIVER: 'mongodb3' })
    assert.deepEqual([before.did.sendReport, after.did.sendReport], [1, 1])
    assert.deepEqual(await collections(), { leases: 0, locks: 1 }, 'mongodb-lock keeps its documents')
  },
  'const old = mongoDbLock(': (given) => {
    const run = async () => (await given.js(undefined, { README_DRIVER: 'mongodb3' })).did.sendReport
    return assertNeedsBoth({ ...given, run, leases: 'leases', old: holdMongodbLock })
  },
  '-const { Locker': async ({ diff, collections }) => {
    const { before, after } = await diff()
    assert.deepEqual([before.did.sendReport, after.did.sendReport], [1, 1])
    assert.deepEqual(await collections(), { locks: 0, 'locco-locks': 0 })
  },
  'retryTimes: 5 ': (given) => {
    // Both locks report a busy name by an error.
    const run = () =>
      given.js().then(
        ({ did }) => did.sendReport,
        (error) => (assert.match(error.message, /RetryError|LOCK_TIMEOUT/), 0),
      )
    return assertNeedsBoth({ ...given, run, leases: 'locks', old: holdLocco })
  },
}

const testsOf = (code) => Object.keys(TESTS).filter((text) => code.includes(text))

test('every block has a test, and every test a block', () => {
  assert.deepEqual(
    blocks.filter(({ code }) => testsOf(code).length !== 1).map(({ document, line }) => `${document}:${line}`),
    [],
  )
  assert.equal(blocks.length, Object.keys(TESTS).length)
})

suite('mongodb', 'every block of the pages for locks in MongoDB', (test) => {
  for (const { document, line, language, code } of blocks) {
    test(
      `${document}:${line}, ${language}`,
      withDatabase('mongodb', async ({ store, collection, t }) => {
        const env = { README_MONGODB_URL: store.target }
        await TESTS[testsOf(code)[0]]({
          code,
          store,
          collection,
          t,
          js: (text = code, more = {}) => project.js(text, { env: { ...env, ...more } }),
          diff: (more = {}) => project.diff(code, { env: { ...env, ...more } }),
          collections: () => counts(collection.client.db(collection.dbName)),
        })
      }),
    )
  }
})

/** Counts the documents of each collection. */
async function counts(database) {
  const names = (await database.listCollections().toArray()).map(({ name }) => name).sort()
  return Object.fromEntries(
    await Promise.all(names.map(async (name) => [name, await database.collection(name).countDocuments()])),
  )
}

/** Asserts that a text block is the error of `connect` while this index exists. */
async function assertMessage({ code, store, collection }, key, options) {
  await collection.createIndex(key, options)
  const { message } = await rejects(store.connect(), 'LOCK_STORE')
  const { version } = await collection.client.db('admin').command({ buildInfo: 1 })
  // The second half is the server's message, which depends on its version.
  const comparable = (text) =>
    version.startsWith('6.0.') ? oneLine(text) : oneLine(text).split('expireAfterSeconds: 0: ')[0]
  assert.equal(comparable(message), comparable(code))
}

/** Asserts that `connect` succeeds after a block for the shell, while this index existed before. */
async function assertRemedy({ code, store, collection }, key, options) {
  await collection.createIndex(key, options)
  await rejects(store.connect(), 'LOCK_STORE')
  const commands = []
  const later =
    (run) =>
    (...args) =>
      void commands.push(() => run(...args))
  const [dropIndex, createIndex] = ['dropIndex', 'createIndex'].map((verb) =>
    later((...args) => collection[verb](...args)),
  )
  const runCommand = later((command) => collection.client.db(collection.dbName).command(command))
  vm.runInNewContext(code, { db: { locks: { dropIndex, createIndex }, runCommand } })
  for (const command of commands) await command()
  const locks = await store.connect()
  assert.equal(await locks.acquireLock('n', 60), true)
  assert.equal(await locks.releaseLock('n'), true)
}

/** Asserts that a version with both locks does the job when both are free, and not while either one is held. */
async function assertNeedsBoth({ run, store, collection, leases, old, t }) {
  const ours = await store.connect({ collection: leases })
  assert.equal(await run(), 1)
  assert.equal(await ours.acquireLock('report', 60), true)
  assert.equal(await run(), 0, 'the new lock is held')
  assert.equal(await ours.releaseLock('report'), true)
  const release = await old(store.target, collection, t)
  assert.equal(await run(), 0, 'the old lock is held')
  // The two locks are independent: this is why a version needs both.
  assert.equal(await ours.acquireLock('report', 60), true)
  assert.equal(await ours.releaseLock('report'), true)
  await release()
  assert.equal(await run(), 1, 'both are free again')
}

async function holdMongodbLock(url, collection, t) {
  const client = await packages('mongodb3').MongoClient.connect(url, { useUnifiedTopology: true })
  t.after(() => client.close())
  const lock = packages('mongodb-lock')(client.db().collection('locks'), 'report')
  const code = await promisify(lock.acquire.bind(lock))()
  assert.ok(code)
  const document = await collection.findOne({ code })
  assert.deepEqual(Object.keys(document), ['_id', 'name', 'code', 'expire', 'inserted'])
  assert.deepEqual([document.name, typeof document.expire, typeof document.inserted], ['report', 'number', 'number'])
  return async () => assert.equal(await promisify(lock.release.bind(lock))(code), true)
}

async function holdLocco(url, collection, t) {
  const { Locker, MongoAdapter } = packages('@kontsedal/locco')
  const client = await new (packages('mongodb').MongoClient)(url).connect()
  t.after(() => client.close())
  const locker = new Locker({ adapter: new MongoAdapter({ client }), retrySettings: { retryDelay: 1, retryTimes: 1 } })
  const lock = await locker.lock('report', 60_000).acquire()
  const theirs = collection.client.db(collection.dbName).collection('locco-locks')
  const { _id, ...document } = await theirs.findOne({ key: 'report' })
  assert.notEqual(_id, 'report')
  assert.deepEqual(Object.keys(document).sort(), ['expireAt', 'key', 'uniqueValue'])
  assert.ok(document.expireAt instanceof Date)
  return () => lock.release({ throwOnFail: true })
}
