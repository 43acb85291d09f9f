// Semaphores and read/write locks: limits, permits, the order of waiters, and all that a share has in common with a lock.
import assert from 'node:assert/strict'
import { assertGrowing, later, rejection, rejects, sleep, SOON_MS, timed, until, waiting } from '../tools.mjs'

/**
 * Asserts what a semaphore or a read/write lock has in use.
 *
 * @param {import('../../index.js').Semaphore | import('../../index.js').ReadWriteLock} shared
 * @param {number[]} permits of the holders, in the order of their grants
 */
async function assertInUse(shared, permits) {
  const info = await shared.inspect()
  assert.deepEqual(
    info.holders.map((holder) => holder.permits),
    permits,
  )
  assert.equal(
    info.used,
    permits.reduce((sum, count) => sum + count, 0),
  )
}

/**
 * Waits until a number of calls are in the queue.
 *
 * @param {import('../../index.js').Semaphore | import('../../index.js').ReadWriteLock} shared
 * @param {number} count
 */
const queued = (shared, count) => until(`${count} in the queue`, async () => (await shared.inspect()).waiting === count)

const release = async (...locks) => {
  for (const lock of locks) assert.equal(await lock.release(), true)
}

export function shared(test) {
  test('a semaphore grants permits up to its limit, and the next one after a release', async (store) => {
    const [a, b] = await store.connectAll(2)
    const [here, there] = [a, b].map((service) => service.semaphore('pool', 3))
    assert.deepEqual([here.name, here.limit], ['pool', 3])
    const [one, two] = [await here.acquire(), await there.acquire({ permits: 2 })]
    assert.deepEqual([one.permits, two.permits, one.name, one.names], [1, 2, 'pool', ['pool']])
    assert.equal(await here.tryAcquire(), null)
    const next = there.acquire({ waitMs: 60_000 })
    await waiting(b, 1)
    await queued(here, 1)
    await assertInUse(here, [1, 2])
    await release(one)
    assert.ok((await timed(next)) < SOON_MS)
    await assertInUse(here, [2, 1])
    const last = await next
    assertGrowing([one, two, last].map((lock) => lock.fencingToken))
    assert.equal(new Set([one, two, last].map((lock) => lock.token)).size, 3)
    await release(two, last)
    await assertInUse(there, [])
  })

  test('inspect returns each holder with its permits', async (store) => {
    const a = await store.connect()
    const semaphore = a.semaphore('pool', 5)
    const empty = { name: 'pool', used: 0, limit: null, waiting: 0, holders: [] }
    assert.deepEqual(await semaphore.inspect(), empty)
    const lock = await semaphore.acquire({ permits: 2, ttlMs: 20_000, metadata: { job: 7 } })
    const info = await semaphore.inspect()
    assert.deepEqual([info.name, info.used, info.limit, info.waiting], ['pool', 2, 5, 0])
    const [{ remainingMs, holder, ...rest }] = info.holders
    assert.deepEqual(rest, {
      name: 'pool',
      fencingToken: lock.fencingToken,
      metadata: { job: 7 },
      permits: 2,
      limit: 5,
    })
    assert.ok(remainingMs > 0 && remainingMs <= store.lasting(20_000), `${remainingMs} ms`)
    assert.equal(holder?.pid, process.pid)
    assert.equal(JSON.parse(JSON.stringify(info)).holders[0].fencingToken, String(lock.fencingToken))
    await release(lock)
    assert.deepEqual(await semaphore.inspect(), empty)
  })

  test('no more than the smallest limit of the call and of all holders is in use', async (store) => {
    const [a, b] = await store.connectAll(2)
    const [narrow, wide] = [a.semaphore('limits', 1), b.semaphore('limits', 3)]
    const first = await narrow.acquire()
    assert.equal(await wide.tryAcquire(), null)
    await release(first)
    const held = [await wide.acquire(), await wide.acquire()]
    assert.equal(await narrow.tryAcquire(), null)
    assert.equal((await narrow.inspect()).limit, 3)
    await release(...held)
    await release(await narrow.acquire())
  })

  test('a call for several permits is not overtaken, and one release grants all that fit', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const semaphore = (service) => service.semaphore('heavy', 4)
    const [one, two] = [await semaphore(a).acquire({ permits: 2 }), await semaphore(a).acquire()]
    const heavy = semaphore(b).acquire({ permits: 3, waitMs: 60_000 })
    await queued(semaphore(a), 1)
    const order = []
    const light = semaphore(c).acquire({ waitMs: 60_000 })
    await queued(semaphore(a), 2)
    for (const call of [heavy, light]) void call.then(({ permits }) => order.push(permits))
    // A permit is free, but the first waiter needs three.
    assert.equal(await semaphore(a).tryAcquire(), null)
    await release(two)
    await sleep(50)
    assert.deepEqual(order, [])
    await release(one)
    const both = await Promise.all([heavy, light])
    await assertInUse(semaphore(a), [3, 1])
    await release(...both)
  })

  test('readers hold at the same time, a writer alone, and a reader waits behind a waiting writer', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const [one, two, three] = [a, b, c].map((service) => service.readWriteLock('catalog'))
    assert.equal(one.name, 'catalog')
    const readers = [await one.read.acquire(), await two.read.acquire()]
    assert.deepEqual(
      readers.map((lock) => lock.permits),
      [1, 1],
    )
    assert.equal(await three.write.tryAcquire(), null)
    const writer = two.write.acquire({ waitMs: 60_000 })
    await waiting(b, 1)
    await queued(one, 1)
    assert.equal(await three.read.tryAcquire(), null)
    const late = three.read.acquire({ waitMs: 60_000 })
    await waiting(c, 1)
    await queued(one, 2)
    await release(...readers)
    const writing = await writer
    assert.equal(writing.permits, 1_048_576)
    const info = await three.inspect()
    assert.deepEqual([info.used, info.limit, info.holders.length], [1_048_576, 1_048_576, 1])
    assert.equal(await one.read.tryAcquire(), null)
    await release(writing)
    const reading = await late
    assertGrowing([...readers, writing, reading].map((lock) => lock.fencingToken))
    await release(reading)
    await assertInUse(one, [])
  })

  test('several readers behind a writer are granted together', async (store) => {
    const [a, b] = await store.connectAll(2)
    const [one, two] = [a, b].map((service) => service.readWriteLock('together'))
    const writer = await one.write.acquire()
    const readers = Promise.all(Array.from({ length: 5 }, () => two.read.acquire({ waitMs: 60_000 })))
    await waiting(b, 5)
    await queued(one, 5)
    await release(writer)
    const held = await readers
    await assertInUse(one, [1, 1, 1, 1, 1])
    assert.equal(new Set(held.map((lock) => lock.fencingToken)).size, 5)
    await release(...held)
  })

  test('using and tryUsing call the job with a permit, and release it', async (store) => {
    const [a, b] = await store.connectAll(2)
    const semaphore = a.semaphore('jobs', 2)
    const value = await semaphore.using({ permits: 2 }, async (lock) => {
      const { holders } = await semaphore.inspect()
      return [lock.isHeld, lock.permits, holders.length]
    })
    assert.deepEqual(value, [true, 2, 1])
    assert.equal(await semaphore.using(() => 'short'), 'short')
    assert.deepEqual(await b.semaphore('jobs', 2).tryUsing(() => 5), { ran: true, value: 5 })
    await assert.rejects(
      semaphore.using(() => Promise.reject(new Error('from fn'))),
      /from fn/,
    )
    const { read, write } = a.readWriteLock('rw')
    assert.deepEqual(await read.tryUsing(undefined, () => write.tryUsing(() => 'never').then(({ ran }) => ran)), {
      ran: true,
      value: false,
    })
    assert.equal(await write.using((lock) => lock.names.join()), 'rw')
    await assertInUse(semaphore, [])
    await assertInUse(a.readWriteLock('rw'), [])
  })

  test('a busy call names the holder whose lease ends first', async (store) => {
    const [a, b] = await store.connectAll(2)
    const semaphore = a.semaphore('busy', 2)
    const locks = [await semaphore.acquire({ ttlMs: 60_000 }), await semaphore.acquire({ ttlMs: 4000, renew: false })]
    const error = await rejects(b.semaphore('busy', 2).acquire({ waitMs: 50 }), 'LOCK_TIMEOUT', { key: 'busy' })
    assert.match(
      error.message,
      /^the semaphore "busy" was still busy after 50 ms: it is held by this process .* and one other holder$/,
    )
    assert.equal(error.holder?.pid, process.pid)
    assert.ok(error.remainingMs !== null && error.remainingMs !== undefined)
    assert.ok(error.remainingMs <= store.lasting(4000), `${error.remainingMs} ms`)
    const attempt = await b.semaphore('busy', 2).tryUsing(() => assert.fail('it ran'))
    assert.ok(!attempt.ran && attempt.holder?.pid === process.pid)
    await release(...locks)
    const { read, write } = a.readWriteLock('busy-rw')
    const reader = await read.acquire()
    assert.match(
      (await rejects(write.acquire({ waitMs: 20 }), 'LOCK_TIMEOUT')).message,
      /^the write lock "busy-rw" was/,
    )
    await release(reader)
  })

  test('a waiter that times out or is aborted grants those behind it, and leaves nothing', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const semaphore = (service) => service.semaphore('left', 3)
    const held = await semaphore(a).acquire({ permits: 2 })
    const ends = [() => ({ waitMs: 400 }), () => ({ signal: AbortSignal.timeout(400), waitMs: 60_000 })]
    for (const end of ends) {
      const heavy = later(rejection(semaphore(b).acquire({ permits: 3, ...end() })))
      await waiting(b, 1)
      await queued(semaphore(a), 1)
      const light = semaphore(c).acquire({ waitMs: 60_000 })
      await heavy
      assert.ok((await timed(light)) < SOON_MS)
      await release(await light)
    }
    await release(held)
    await until('an empty queue', async () => (await semaphore(a).inspect()).waiting === 0)
  })

  test('a permit is renewed, and one without renewal ends after its ttl', async (store) => {
    const [a, b] = await store.connectAll(2)
    const semaphore = a.semaphore('lease', 2)
    const renewed = await semaphore.acquire({ ttlMs: 1500 })
    const brief = await semaphore.acquire({ ttlMs: 1500, renew: false })
    const { signal } = brief
    const next = b.semaphore('lease', 2).acquire({ waitMs: 60_000 })
    await waiting(b, 1)
    const took = await timed(next)
    assert.ok(took < 1500 + 3 * SOON_MS, `${took} ms`)
    await until('the loss', () => signal.aborted)
    assert.equal(signal.reason.code, 'LOCK_LOST')
    assert.match(signal.reason.message, /^the permit of "lease" is lost: /)
    assert.equal(await brief.release(), false)
    await sleep(1500)
    assert.deepEqual([renewed.isHeld, renewed.signal.aborted], [true, false])
    await renewed.extend(20_000)
    await release(renewed, await next)
    await assertInUse(semaphore, [])
  })

  test('a lock and a shared name with the same text are two names', async (store) => {
    const a = await store.connect()
    const semaphore = a.semaphore('same', 1)
    const lock = await a.acquire('same')
    const permit = await semaphore.acquire()
    assert.equal(await a.tryAcquire('same'), null)
    assert.equal(await semaphore.tryAcquire(), null)
    assert.equal((await a.inspect('same'))?.fencingToken, lock.fencingToken)
    assert.deepEqual(
      (await a.list()).map(({ name }) => name),
      ['same'],
    )
    // But a semaphore and a read/write lock are one.
    assert.equal(await a.readWriteLock('same').read.tryAcquire(), null)
    await release(lock)
    await assertInUse(semaphore, [1])
    assert.deepEqual(await a.list(), [])
    assert.equal(await a.forceRelease('same'), false)
    await release(permit)
    for (const name of ['same:', 'sam', 'same2']) {
      const held = await semaphore.acquire()
      await release(await a.semaphore(name, 1).acquire({ waitMs: 0 }), held)
    }
  })

  test('forceRelease releases all holders, which lose their permits', async (store) => {
    const [a, b] = await store.connectAll(2)
    const semaphore = a.semaphore('forced', 2)
    assert.equal(await semaphore.forceRelease(), false)
    const held = [await semaphore.acquire({ ttlMs: 900 }), await semaphore.acquire({ ttlMs: 900 })]
    const next = b.semaphore('forced', 2).acquire({ permits: 2, waitMs: 60_000 })
    await waiting(b, 1)
    assert.equal(await b.semaphore('forced', 2).forceRelease(), true)
    await until('both losses', () => held.every((lock) => lock.signal.aborted))
    assert.deepEqual(
      held.map((lock) => lock.isHeld),
      [false, false],
    )
    await release(await next)
    const writer = await a.readWriteLock('forced').write.acquire()
    assert.equal(await b.readWriteLock('forced').forceRelease(), true)
    assert.equal(await writer.release(), false)
  })

  test('a permit cannot be transferred', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.semaphore('mine', 1).acquire()
    assert.throws(() => lock.transferable(), {
      code: 'LOCK_INVALID_ARGUMENT',
      message: /^transferable\(\) must be called on a lock/,
    })
    const { token, fencingToken } = lock
    const forged = { names: ['mine'], token, fencingToken: String(fencingToken), ttlMs: 1000, renew: false }
    await rejects(b.restore(forged), 'LOCK_LOST')
    assert.equal('token' in JSON.parse(JSON.stringify(lock)), false)
    await release(lock)
  })

  test('a view has a prefix, which its results and errors omit', async (store) => {
    const a = await store.connect()
    const view = a.withPrefix('app:')
    const lock = await view.semaphore('pool', 1).acquire()
    assert.equal(lock.name, 'pool')
    assert.equal((await view.semaphore('pool', 1).inspect()).holders[0].name, 'pool')
    assert.equal((await a.semaphore('app:pool', 1).inspect()).holders[0].name, 'app:pool')
    assert.deepEqual(await a.semaphore('pool', 1).tryUsing(() => 1), { ran: true, value: 1 })
    const error = await rejects(view.semaphore('pool', 1).acquire({ waitMs: 0 }), 'LOCK_TIMEOUT', { key: 'pool' })
    assert.match(error.message, /^the semaphore "pool" /)
    assert.equal(await view.semaphore('pool', 1).forceRelease(), true)
    assert.equal(await lock.release(), false)
  })

  test('a minimum hold keeps the permits in use', async (store) => {
    const a = await store.connect()
    const semaphore = a.semaphore('kept', 2)
    await release(await semaphore.acquire({ minHoldMs: 1500 }))
    await assertInUse(semaphore, [1])
    assert.equal(await semaphore.tryAcquire({ permits: 2 }), null)
    const both = await semaphore.acquire({ permits: 2, waitMs: 60_000 })
    await release(both)
  })

  test('a waiter with metadata is granted in the order of the queue', async (store) => {
    const [a, b] = await store.connectAll(2)
    const semaphore = a.semaphore('described', 1)
    const held = await semaphore.acquire()
    const described = b.semaphore('described', 1).acquire({ metadata: { job: 1 }, waitMs: 60_000 })
    await waiting(b, 1)
    await queued(semaphore, 1)
    const last = semaphore.acquire({ waitMs: 60_000 })
    await waiting(a, 1)
    await release(held)
    const next = await described
    assert.deepEqual((await semaphore.inspect()).holders[0].metadata, { job: 1 })
    await release(next)
    await release(await last)
  })

  test('a service that closes releases its permits, after a drain those that are left', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const semaphore = (service) => service.semaphore('closing', 2)
    const [kept, ended] = [await semaphore(a).acquire(), await semaphore(b).acquire()]
    const waits = semaphore(b).acquire({ waitMs: 60_000 })
    await waiting(b, 1)
    const next = semaphore(c).acquire({ permits: 2, waitMs: 60_000 })
    await waiting(c, 1)
    await Promise.all([b.close(), rejects(waits, 'LOCK_CLOSED')])
    assert.equal(ended.signal.reason.code, 'LOCK_LOST')
    await rejects(semaphore(b).acquire(), 'LOCK_CLOSED')
    await rejects(semaphore(b).inspect(), 'LOCK_CLOSED')
    const closing = a.close({ drainMs: '30s' })
    assert.equal(kept.isHeld, true)
    await release(kept)
    await closing
    await release(await next)
  })

  test('a lazy service connects at the first call of a semaphore', async (store) => {
    const lazy = await store.connect({ lazy: true, defaults: { onStoreError: 'wait' } })
    const semaphore = lazy.semaphore('lazy', 2)
    assert.equal((await semaphore.inspect()).used, 0)
    const lock = await semaphore.acquire({ permits: 2, signal: new AbortController().signal })
    assert.equal(lock.permits, 2)
    assert.equal(await semaphore.tryAcquire(), null)
    await release(lock)
  })

  test('many callers of several services never exceed the limit', async (store) => {
    const services = await store.connectAll(3)
    const tokens = new Set()
    let [used, most] = [0, 0]
    const call = async (index) => {
      const permits = 1 + (index % 3)
      const semaphore = services[index % 3].semaphore('load', 4)
      await semaphore.using({ permits, waitMs: 60_000 }, async ({ fencingToken }) => {
        used += permits
        most = Math.max(most, used)
        tokens.add(fencingToken)
        await sleep(index % 5)
        used -= permits
      })
    }
    await Promise.all(Array.from({ length: 60 }, (_, index) => call(index)))
    assert.ok(most <= 4, `${most} permits in use`)
    assert.ok(most > 1, 'only one caller at a time')
    assert.equal(tokens.size, 60)
    await until('no holder', async () => (await services[0].semaphore('load', 4).inspect()).used === 0)
  })

  test('elect with maxLeaders has that number of leaders, and a successor for each that ends', async (store) => {
    const services = await store.connectAll(5)
    let [leading, most] = [0, 0]
    /** @type {bigint[]} */
    const terms = []
    const elections = services.map((service) =>
      service.elect('consumers', { ttlMs: '10s', maxLeaders: 3 }, async ({ signal, term, isLeader }) => {
        assert.equal(isLeader, true)
        terms.push(term)
        most = Math.max(most, ++leading)
        await new Promise((resolve) => signal.addEventListener('abort', resolve))
        leading--
      }),
    )
    const leaders = () => elections.filter(({ isLeader }) => isLeader)
    const semaphore = services[0].semaphore('consumers', 3)
    await until('three leaders', () => leaders().length === 3)
    await queued(semaphore, 2)
    await assertInUse(semaphore, [1, 1, 1])
    const [one, two] = leaders()
    await one.stop()
    await until('a fourth leader', () => leaders().length === 3)
    await queued(semaphore, 1)
    await two.resign()
    await until('the last candidate', () => terms.length === 5)
    // The one that resigned is a candidate again.
    await queued(semaphore, 1)
    assert.equal(two.isLeader, false)
    assert.equal(await services[0].inspect('consumers'), null)
    await Promise.all(elections.map((election) => election.stop()))
    assert.deepEqual([most, new Set(terms).size, leading], [3, 5, 0])
    // A candidate that was granted a permit while it stopped releases it in the background.
    await until('no leader', async () => (await semaphore.inspect()).used === 0)
  })
}
