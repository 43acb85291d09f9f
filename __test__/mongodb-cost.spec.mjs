// The cost of the queue in MongoDB: operations while calls wait, operations per hand-off, and what is left.
import assert from 'node:assert/strict'
import { describe, it } from 'node:test'
import { Gist } from './gist.mjs'
import { directUrl, withMongo } from './mongodb-client.mjs'
import { WaiterProcesses } from './waiter-processes.mjs'
import { proxySuite } from './proxy.mjs'
import { later, median, sleep, until, waiting } from './tools.mjs'

/** Runs `body` with the server's database on the official driver. */
const withDriver = ({ server }, body) => withMongo(directUrl(server.port), (client) => body(client.db()))

/** Sleeps in slices, so that a machine that stands still makes it longer. Resolves to how long it took, in milliseconds. */
async function sleepInSlices(ms) {
  const startedAt = performance.now()
  for (let slice = 0; slice < ms / 100; slice++) await sleep(100)
  return performance.now() - startedAt
}

/** Lists the operations on the locks that the server's profiler records while `body` runs. */
const operations = (fixture, body) =>
  withDriver(fixture, async (db) => {
    await db.command({ profile: 2 })
    await body()
    await db.command({ profile: 0 })
    const profile = db.collection('system.profile')
    const found = await profile.find({ ns: 'holdfast.locks', appName: 'holdfast' }).toArray()
    await profile.drop()
    return found
  })

/** Counts the waiters for `n`. */
const positions = (fixture) =>
  withDriver(
    fixture,
    async (db) => (await db.collection('locks').findOne({ _id: fixture.key('n') }))?.queue?.length ?? 0,
  )

/** How long a document may stay: less than a ttl and than an unconfirmed hand-off, so that it was deleted and did not expire. */
const GONE_MS = 8000

/**
 * Waits until the collection is empty. A release without an answer is repeated in the background, and `using` does not report
 * it, so a document may stay for a moment where the server stands still.
 */
async function assertNoDocument(fixture) {
  let left = []
  const isEmpty = async (db) => (left = await db.collection('locks').find().toArray()).length === 0
  await withDriver(fixture, (db) => until('no document', () => isEmpty(db), GONE_MS)).catch((cause) => {
    throw new Error(`${left.length} documents are left, for example ${JSON.stringify(left.slice(0, 3))}`, { cause })
  })
}

proxySuite('mongodb-replica-set', 'what waiting costs', { serverPerTest: true }, (test) => {
  test('100 waiters in 4 processes send less than one operation per process and second', async (fixture, t) => {
    // With the default ttl: its renewals are counted, too.
    const held = await fixture.direct.acquire('n')
    const waiters = new WaiterProcesses(t, { url: fixture.server.url, options: fixture.options })
    const expected = await waiters.gather(4, 25)
    let tookMs = 0
    const sent = await operations(fixture, async () => (tookMs = await sleepInSlices(10_000)))
    assert.ok(
      sent.length < (4 * tookMs) / 1000,
      `${sent.length} operations in ${tookMs} ms: ${sent.map(({ op }) => op)}`,
    )
    // The heartbeats were counted.
    assert.ok(sent.length >= 4 * 2, `${sent.length} operations in ${tookMs} ms`)
    assert.equal(await held.release(), true)
    await waiters.assertServed(expected)
    await waiters.assertUnused()
  })

  test('a hand-off costs at most 6 operations, for any number of waiters', async (fixture) => {
    const locks = await fixture.connect({}, fixture.server.port)
    const perHandOff = []
    for (const count of [1, 10, 100]) {
      const held = await fixture.direct.acquire('n')
      const calls = Array.from({ length: count }, () => later(locks.using('n', { waitMs: 60_000 }, () => {})))
      await waiting(locks, count)
      await until('all waiters are in the queue', async () => (await positions(fixture)) === count)
      const sent = await operations(fixture, async () => {
        await held.release()
        await Promise.all(calls)
      })
      perHandOff.push(sent.length / count)
    }
    // The release with the hand-off, the change event, and the confirmation; at the end one more release, which deletes.
    for (const operations of perHandOff) assert.ok(operations >= 1 && operations <= 6, `${perHandOff} operations`)
    assert.ok(perHandOff[2] <= perHandOff[0] + 1, `${perHandOff} operations`)
  })

  test('a process with waiters receives no events of other names', async (fixture, t) => {
    const perPair = () =>
      withDriver(fixture, async (db) => {
        const PAIRS = 200
        const bytes = async () => (await db.command({ serverStatus: 1 })).network.bytesOut
        const before = await bytes()
        for (let pair = 0; pair < PAIRS; pair++) await (await fixture.direct.acquire(`pair${pair}`)).release()
        return Number((await bytes()) - before) / PAIRS
      })
    const alone = await perPair()
    const held = await Promise.all(Array.from({ length: 12 }, (_, index) => fixture.direct.acquire(`w${index}`)))
    const calls = []
    for (let index = 0; index < held.length; index++) {
      const locks = await fixture.connect({}, fixture.server.port)
      calls.push(later(locks.using(`w${index}`, { waitMs: 60_000 }, () => {})))
      await waiting(locks, 1)
    }
    await until('all waiters are in the queue', () =>
      withDriver(
        fixture,
        async (db) => (await db.collection('locks').countDocuments({ 'queue.0': { $exists: true } })) === held.length,
      ),
    )
    const beside = await perPair()
    t.diagnostic(`${alone} bytes per pair, ${beside} with 12 waiting processes`)
    // If each process received the events of each pair, this would be three times as much.
    assert.ok(beside < 2 * alone, `${beside} bytes per pair with 12 waiting processes, ${alone} without them`)
    await Promise.all(held.map((lock) => lock.release()))
    await Promise.all(calls)
  })

  test('300 names with waiters leave no document', async (fixture) => {
    // Where a write to the disk takes 0.1 s, the releases take longer than the default timeout. They are not the subject.
    const [holder, locks] = await Promise.all(
      Array.from({ length: 2 }, () => fixture.connect({ storeTimeoutMs: 30_000 }, fixture.server.port)),
    )
    const names = Array.from({ length: 300 }, (_, index) => `n${index}`)
    const held = await Promise.all(names.map((name) => holder.acquire(name)))
    const calls = names.map((name) => later(locks.using(name, { waitMs: 60_000 }, () => {})))
    await waiting(locks, names.length)
    await Promise.all(held.map((lock) => lock.release()))
    await Promise.all(calls)
    await assertNoDocument(fixture)
  })

  test('300 releases at once end within the store timeout where an answer takes 320 ms', async (fixture) => {
    const holder = await fixture.connect({ storeTimeoutMs: 10_000 })
    const names = Array.from({ length: 300 }, (_, index) => `n${index}`)
    const held = await Promise.all(names.map((name) => holder.acquire(name)))
    const calls = names.map((name) => later(fixture.direct.using(name, { waitMs: 60_000 }, () => {})))
    await waiting(fixture.direct, names.length)
    fixture.proxy.delayMs = 160
    const released = await Promise.allSettled(held.map((lock) => lock.release()))
    fixture.proxy.delayMs = 0
    const failed = released.filter(({ status }) => status === 'rejected')
    assert.deepEqual([failed.length, failed[0]], [0, undefined])
    await Promise.all(calls)
  })
})

proxySuite('mongodb-replica-set', 'a name of a gist process', { serverPerTest: true }, (test) => {
  test('its release wakes a waiter as fast as on a standalone', async (fixture, t) => {
    const locks = await fixture.connect({}, fixture.server.port)
    await withDriver(fixture, async (db) => {
      const gist = new Gist(db.collection('locks'))
      const delays = []
      for (let round = 0; round < 9; round++) {
        const name = `n${round}`
        assert.equal(await gist.acquireLock(fixture.key(name), 60), true)
        const call = later(locks.acquire(name, { waitMs: 60_000 }))
        await waiting(locks, 1)
        await sleep(400)
        const releasedAt = performance.now()
        await gist.releaseLock(fixture.key(name))
        const lock = await call
        delays.push(performance.now() - releasedAt)
        assert.equal(await lock.release(), true)
      }
      t.diagnostic(`${delays.map(Math.round)} ms`)
      // A waiter that only the heartbeat wakes waits a second in the median.
      assert.ok(median(delays) < 700, `${delays} ms`)
    })
  })

  test('waiting for it writes no more than the heartbeats', async (fixture) => {
    const locks = await fixture.connect({}, fixture.server.port)
    await withDriver(fixture, async (db) => {
      const gist = new Gist(db.collection('locks'))
      assert.equal(await gist.acquireLock(fixture.key('n'), 60), true)
      const call = later(locks.acquire('n', { waitMs: 60_000 }))
      await waiting(locks, 1)
      await sleep(1000)
      const sent = await operations(fixture, () => sleep(5000))
      const writes = sent.filter(({ op }) => op !== 'query' && op !== 'getmore')
      assert.ok(writes.length <= 6, `${writes.length} writes in 5 s: ${writes.map(({ op }) => op)}`)
      await gist.releaseLock(fixture.key('n'))
      assert.equal(await (await call).release(), true)
    })
  })
})

proxySuite('mongodb', 'what waiting costs', { serverPerTest: true }, (test) => {
  test('the waiters of a process for a name poll like one waiter', async (fixture) => {
    const held = await fixture.direct.acquire('n')
    const locks = await fixture.connect({}, fixture.server.port)
    const calls = Array.from({ length: 20 }, () => later(locks.using('n', { waitMs: 60_000 }, () => {})))
    await waiting(locks, calls.length)
    // By then the polling interval has reached its maximum, 150 to 250 ms.
    await sleep(2000)
    let tookMs = 0
    const sent = await operations(fixture, async () => (tookMs = await sleepInSlices(3000)))
    const polls = sent.filter(({ command }) => command.q?._id !== undefined || command.findAndModify || command.find)
    assert.ok(polls.length >= 5, `${polls.length} polls`)
    assert.ok(polls.length <= tookMs / 150 + 5, `${polls.length} polls in ${tookMs} ms`)
    await held.release()
    await Promise.all(calls)
  })
})

// The issue "One of each" keeps waiters as documents, and has one batcher for the calls of all stores.
describe('mongodb: One of each', () => {
  it.todo('a hand-off writes as many bytes to the oplog with 10 000 waiters as with one')
  it.todo('a hand-off lasts as long as the process of its waiter counts as alive')
  it.todo('3 000 leases are renewed with one command for 64 of them')
})
