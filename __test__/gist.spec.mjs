// The gist and holdfast on one collection, as in a rolling deployment.
import assert from 'node:assert/strict'
import { withDatabase } from './database.mjs'
import { suite } from './stores.mjs'
import { assertGrowing, rejects, sleep, SOON_MS, timed, until, waiting } from './tools.mjs'

// The TTL monitor of the tests' server runs every second, by default every minute.
const MONITOR_MS = 80_000

function sideBySide(kind, test) {
  const both = (name, body) => test(name, withDatabase(kind, body))

  both('a lock of holdfast excludes the gist', async ({ store, gist }) => {
    const ours = await store.connect()
    await gist.start()
    assert.equal(await ours.acquireLock('n1', 60), true)
    const lock = await ours.acquire(['n2', 'n3'])
    for (const name of ['n1', 'n2', 'n3']) assert.equal(await gist.acquireLock(name, 60), false)
    assert.equal(await gist.acquireLock('n4', 60), true)
    assert.equal(await ours.releaseLock('n1'), true)
    assert.equal(await lock.release(), true)
    for (const name of ['n1', 'n2', 'n3']) assert.equal(await gist.acquireLock(name, 60), true)
  })

  both('a lock of the gist excludes holdfast', async ({ store, gist }) => {
    await gist.start()
    const ours = await store.connect()
    assert.equal(await gist.acquireLock('n', 60), true)
    assert.equal(await ours.acquireLock('n', 60), false)
    assert.equal(await ours.tryAcquire('n'), null)
    assert.equal(await ours.tryAcquire(['m', 'n']), null)
    assert.equal(await ours.acquireAndExecute('n', () => assert.fail('fn was called')), undefined)
    await rejects(ours.acquire('n', { waitMs: 100 }), 'LOCK_TIMEOUT')
    assert.equal(await gist.acquireLock('n', 60), false)
    await gist.releaseLock('n')
    assert.equal(await ours.acquireLock('n', 60), true)
    assert.equal(await ours.acquireLock('m', 60), true)
  })

  both('holdfast writes the gist’s document and creates the gist’s index', async ({ store, gist, collection }) => {
    const ours = await store.connect()
    const began = Date.now()
    const lock = await ours.acquire('n', { ttlMs: 20_000, metadata: 'm' })
    const document = await collection.findOne({ _id: 'n' })
    assert.ok(document.expiresAt instanceof Date)
    const left = document.expiresAt.getTime() - began
    assert.ok(left > 10_000 && left < 60_000, `${left} ms`)
    assert.equal(await lock.release(), true)
    assert.equal(await collection.countDocuments(), 0)
    await gist.start()
    await store.connect()
    const indexes = (await collection.indexes()).filter(({ key }) => key.expiresAt)
    assert.deepEqual(
      indexes.map(({ key, expireAfterSeconds }) => [key, expireAfterSeconds]),
      [[{ expiresAt: 1 }, 0]],
    )
  })

  both(
    'inspect and list return the gist’s locks, and forceRelease releases them',
    async ({ store, gist, collection }) => {
      const ours = await store.connect()
      await gist.acquireLock('theirs', 60)
      await collection.insertOne({ _id: 'endless' })
      const info = await ours.inspect('theirs')
      assert.ok(info.remainingMs > 30_000 && info.remainingMs < 90_000, `${info.remainingMs} ms`)
      const nothing = { fencingToken: null, holder: null, metadata: null, waiting: store.ordered ? 0 : null }
      const stranger = { name: 'theirs', remainingMs: 0, ...nothing }
      assert.deepEqual({ ...info, remainingMs: 0 }, stranger)
      assert.equal((await ours.inspect('endless')).remainingMs, Infinity)
      assert.equal(await ours.tryAcquire('endless'), null)
      assert.deepEqual(
        (await ours.list()).map(({ name }) => name),
        ['endless', 'theirs'],
      )
      for (const name of ['endless', 'theirs']) assert.equal(await ours.forceRelease(name), true)
      assert.equal(await gist.acquireLock('theirs', 60), true)
    },
  )

  both('a waiter of holdfast is woken when the gist releases', async ({ store, gist }) => {
    const ours = await store.connect()
    await gist.acquireLock('n', 60)
    const wait = ours.acquire('n', { waitMs: 60_000 })
    await waiting(ours, 1)
    await gist.releaseLock('n')
    const took = await timed(wait)
    assert.ok(took < SOON_MS, `after ${took} ms`)
    assert.equal(await gist.acquireLock('n', 60), false)
    assert.equal(await (await wait).release(), true)
  })

  both(
    'the gist acquires an expired lock of holdfast after the TTL monitor has run',
    async ({ store, gist, collection }) => {
      const ours = await store.connect()
      assert.equal(await ours.acquireLock('n', 1.5), true)
      const began = Date.now()
      await until('the TTL monitor', () => gist.acquireLock('n', 60), MONITOR_MS)
      assert.ok(Date.now() - began >= 1450, 'deleted too early')
      // The earlier holder releases nothing and renews nothing.
      assert.equal(await ours.releaseLock('n'), false)
      const { expiresAt } = await collection.findOne({ _id: 'n' })
      assert.equal(await gist.acquireLock('n', 60), false)
      await sleep(100)
      assert.deepEqual((await collection.findOne({ _id: 'n' })).expiresAt, expiresAt)
    },
  )

  both(
    'holdfast acquires an expired lock of the gist before the TTL monitor has run',
    async ({ store, gist, collection }) => {
      const ours = await store.connect()
      await gist.start()
      for (let round = 0, isShown = false; !isShown; round++) {
        assert.ok(round < 50, 'the TTL monitor always ran first')
        await collection.deleteMany({})
        // As long as this document exists, the TTL monitor has not run.
        await gist.acquireLock('canary', -10)
        await gist.acquireLock('n', -5)
        const isGistFirst = await gist.acquireLock('n', 60)
        assert.equal(
          isGistFirst && (await collection.findOne({ _id: 'canary' })) !== null,
          false,
          'the gist waits for the TTL monitor',
        )
        if (isGistFirst) continue
        assert.equal(await ours.inspect('n'), null)
        const lock = await ours.tryAcquire('n')
        assert.equal(lock?.isHeld, true)
        isShown = (await collection.findOne({ _id: 'canary' })) !== null
        assert.equal(await gist.acquireLock('n', 60), false)
        assert.ok((await ours.inspect('n')).remainingMs > 10_000)
        assert.equal(await lock.release(), true)
      }
    },
  )

  both('a waiter of holdfast is granted the name when the gist’s document expires', async ({ store, gist }) => {
    const ours = await store.connect()
    await gist.acquireLock('n', 1)
    const began = Date.now()
    const lock = await ours.acquire('n', { waitMs: 30_000 })
    assert.ok(Date.now() - began < 1000 + SOON_MS, `after ${Date.now() - began} ms`)
    assert.equal(await gist.acquireLock('n', 60), false)
    assert.equal(await lock.release(), true)
  })

  both('holdfast never releases a lock of the gist', async ({ store, gist, collection }) => {
    const ours = await store.connect()
    await gist.acquireLock('n', 60)
    assert.equal(await ours.releaseLock('n'), false)
    const before = await collection.findOne({ _id: 'n' })
    await rejects(ours.acquire('n', { waitMs: 50 }), 'LOCK_TIMEOUT')
    const json = { names: ['n'], token: 'a'.repeat(32), fencingToken: '1', ttlMs: 1000, renew: false }
    await rejects(ours.restore(json), 'LOCK_LOST')
    await ours.close()
    assert.deepEqual(await collection.findOne({ _id: 'n' }), before)
  })

  both('the gist deletes any lock, and holdfast reports the loss', async ({ store, gist, collection }) => {
    const ours = await store.connect()
    const [lock, renewed] = [await ours.acquire('n1'), await ours.acquire('n2', { ttlMs: 900 })]
    const used = ours.using('n3', async () => {
      await gist.releaseLock('n3')
      await gist.acquireLock('n3', 60)
    })
    await rejects(used, 'LOCK_LOST', { key: 'n3' })
    await gist.releaseLock('n1')
    await gist.releaseLock('n2')
    assert.equal(await gist.acquireLock('n1', 60), true)
    assert.equal(await gist.acquireLock('n2', 60), true)
    const all = () => collection.find().sort({ _id: 1 }).toArray()
    const before = await all()
    await rejects(lock.extend(60_000), 'LOCK_LOST')
    await until('a renewal reports the loss', () => renewed.signal.aborted)
    assert.deepEqual([await lock.release(), await renewed.release()], [false, false])
    assert.deepEqual(await all(), before, 'the gist’s documents are unchanged')
    assert.equal(before.length, 3)
  })

  both('fencing tokens grow across locks of the gist in between', async ({ store, gist }) => {
    const ours = await store.connect()
    const tokens = []
    for (let round = 0; round < 4; round++) {
      await ours.using('n', ({ fencingToken }) => tokens.push(fencingToken))
      assert.equal(await gist.acquireLock('n', 60), true)
      await gist.releaseLock('n')
      await gist.acquireLock('n', -1)
    }
    assertGrowing(tokens)
  })

  both(
    'services and gist instances that increment an unprotected counter under a lock lose no increment',
    async ({ store, gist }) => {
      const services = await store.connectAll(2)
      await gist.start()
      let counter = 0
      const add = async () => {
        const read = counter
        await sleep(2)
        counter = read + 1
      }
      const gistWorker = async () => {
        for (let i = 0; i < 12; i++) {
          await until('a grant to the gist', () => gist.acquireLock('counter', 60), 60_000)
          await add()
          await gist.releaseLock('counter')
        }
      }
      const withGistApi = async (service) => {
        for (let i = 0; i < 12; i++) {
          await until('a grant to holdfast', () => service.acquireLock('counter', 60), 60_000)
          await add()
          assert.equal(await service.releaseLock('counter'), true)
        }
      }
      const withUsing = async (service) => {
        for (let i = 0; i < 12; i++) await service.using('counter', { waitMs: 60_000 }, add)
      }
      await Promise.all([
        gistWorker(),
        gistWorker(),
        withGistApi(services[0]),
        withUsing(services[0]),
        withUsing(services[1]),
      ])
      assert.equal(counter, 60)
    },
  )
}

for (const kind of ['mongodb', 'mongodb-replica-set']) suite(kind, 'with the gist', (test) => sideBySide(kind, test))
