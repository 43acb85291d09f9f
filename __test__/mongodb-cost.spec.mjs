// What the queue in MongoDB costs the server: operations while it waits, operations per hand-off, and what is left.
import assert from 'node:assert/strict'
import { MongoClient } from 'mongodb'
import { WaiterProcesses } from './waiter-processes.mjs'
import { proxySuite } from './proxy.mjs'
import { sleep, until, waiting } from './tools.mjs'

/** Looks at the server's database behind the addon's back. */
async function look({ server }, body) {
  const client = await MongoClient.connect(`mongodb://127.0.0.1:${server.port}/holdfast?directConnection=true`)
  try {
    return await body(client.db())
  } finally {
    await client.close()
  }
}

/** The operations on the locks that the server carries out while `body` runs, as its profiler writes them down. */
const operations = (fixture, body) =>
  look(fixture, async (db) => {
    await db.command({ profile: 2 })
    await body()
    await db.command({ profile: 0 })
    const profile = db.collection('system.profile')
    const found = await profile.find({ ns: 'holdfast.locks', appName: 'holdfast' }).toArray()
    await profile.drop()
    return found
  })

/** How many wait for `n`. */
const places = ({ options, ...fixture }) =>
  look(fixture, async (db) => (await db.collection('locks').findOne({ _id: `${options.keyPrefix}n` }))?.queue?.length ?? 0)

/** Who waits for `n`, so many in each of some processes. */
async function gather(t, { server, options }, { processes, each }) {
  const all = new WaiterProcesses(t, { url: server.url, options })
  const children = await all.processes(processes)
  const expected = []
  for (let index = 0; index < processes * each; index++) {
    expected.push(`w${index}`)
    await all.enqueue(children[index % processes], `w${index}`)
  }
  return { all, expected }
}

proxySuite('mongodb-replica-set', 'what waiting costs', { serverPerTest: true }, (test) => {
  test('100 waiters of 4 processes send less than one operation per process and second', async (fixture, t) => {
    // With the default ttl: its renewals are among what is counted.
    const held = await fixture.direct.acquire('n')
    const { all, expected } = await gather(t, fixture, { processes: 4, each: 25 })
    const sent = await operations(fixture, () => sleep(10_000))
    assert.ok(sent.length < 4 * 10, `${sent.length} operations in 10 s: ${sent.map(({ op }) => op)}`)
    // It is alive signs that were counted, and no silence.
    assert.ok(sent.length >= 4 * 4, `${sent.length} operations in 10 s`)
    assert.equal(await held.release(), true)
    await all.serves(expected)
    await all.isOver()
  })

  test('a hand-off costs a few operations, however many wait', async (fixture) => {
    const locks = await fixture.connect({}, fixture.server.port)
    const perHandOff = []
    for (const crowd of [1, 10, 100]) {
      const held = await fixture.direct.acquire('n')
      const turns = Array.from({ length: crowd }, () => locks.using('n', { waitMs: 60_000 }, () => {}))
      await waiting(locks, crowd)
      await until('all have a place', async () => (await places(fixture)) === crowd)
      const sent = await operations(fixture, async () => {
        await held.release()
        await Promise.all(turns)
      })
      perHandOff.push(sent.length / crowd)
    }
    // The release that hands on, the news of it, and the confirmation; in the end one more release, which deletes.
    for (const operations of perHandOff) assert.ok(operations <= 6, `${perHandOff} operations`)
    assert.ok(perHandOff[2] <= perHandOff[0] + 1, `${perHandOff} operations`)
  })

  test('a process that waits receives nothing of the names that others use', async (fixture, t) => {
    const perPair = () =>
      look(fixture, async (db) => {
        const PAIRS = 200
        const bytes = async () => (await db.command({ serverStatus: 1 })).network.bytesOut
        const before = await bytes()
        for (let pair = 0; pair < PAIRS; pair++) await (await fixture.direct.acquire(`pair${pair}`)).release()
        return Number((await bytes()) - before) / PAIRS
      })
    const alone = await perPair()
    const held = await Promise.all(Array.from({ length: 12 }, (_, index) => fixture.direct.acquire(`w${index}`)))
    const turns = []
    for (let index = 0; index < held.length; index++) {
      const locks = await fixture.connect({}, fixture.server.port)
      turns.push(locks.using(`w${index}`, { waitMs: 60_000 }, () => {}))
      turns.at(-1).catch(() => {})
      await waiting(locks, 1)
    }
    await until('all have a place', () => look(fixture, async (db) => (await db.collection('locks').countDocuments({ 'queue.0': { $exists: true } })) === held.length))
    const beside = await perPair()
    t.diagnostic(`${alone} bytes per pair, ${beside} beside 12 processes that wait`)
    // If each process got the events of each pair, this would be three times as much.
    assert.ok(beside < 2 * alone, `${beside} bytes per pair beside 12 processes that wait, ${alone} without them`)
    await Promise.all(held.map((lock) => lock.release()))
    await Promise.all(turns)
  })

  test('many names that were waited for leave nothing', async (fixture) => {
    const locks = await fixture.connect({}, fixture.server.port)
    const names = Array.from({ length: 300 }, (_, index) => `n${index}`)
    const held = await Promise.all(names.map((name) => fixture.direct.acquire(name)))
    const turns = names.map((name) => locks.using(name, { waitMs: 60_000 }, () => {}))
    await waiting(locks, names.length)
    await Promise.all(held.map((lock) => lock.release()))
    await Promise.all(turns)
    assert.equal(await look(fixture, (db) => db.collection('locks').countDocuments()), 0)
  })
})

proxySuite('mongodb', 'what waiting costs', { serverPerTest: true }, (test) => {
  test('all waiters of a process for a name make the looks of one', async (fixture) => {
    const held = await fixture.direct.acquire('n')
    const locks = await fixture.connect({}, fixture.server.port)
    const turns = Array.from({ length: 20 }, () => locks.using('n', { waitMs: 60_000 }, () => {}))
    await waiting(locks, turns.length)
    // The pauses have grown to their longest, 150 to 250 ms, by then.
    await sleep(2000)
    const sent = await operations(fixture, () => sleep(3000))
    const looks = sent.filter(({ command }) => command.q?._id !== undefined || command.findAndModify || command.find)
    assert.ok(looks.length >= 5, `${looks.length} looks`)
    assert.ok(looks.length <= 3000 / 150 + 5, `${looks.length} looks`)
    await held.release()
    await Promise.all(turns)
  })
})
