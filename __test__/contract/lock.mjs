// The Lock object: every member, and its state when the lease is lost.
import assert from 'node:assert/strict'
import { once } from 'node:events'
import {
  assertFree,
  assertGrowing,
  assertLockError,
  block,
  later,
  rejects,
  sleep,
  until,
  waiting,
  SOON_MS,
} from '../tools.mjs'

export function lock(test) {
  test('a lock has its names, token, fencing token and remaining time', async (store) => {
    const a = await store.connect()
    const [lock, other] = [await a.acquire('order:42', { ttlMs: 60_000 }), await a.acquire('order:43')]
    assert.equal(lock.name, 'order:42')
    assert.deepEqual(lock.names, ['order:42'])
    assert.match(lock.token, /^[0-9a-f]{32}$/)
    assert.notEqual(lock.token, other.token)
    assert.equal(typeof lock.fencingToken, 'bigint')
    assert.ok(lock.fencingToken > 0n && lock.fencingToken < 2n ** 53n)
    const longest = store.lasting(60_000)
    assert.ok(lock.remainingMs > longest * 0.66 && lock.remainingMs <= longest * 0.99 - 2, `${lock.remainingMs} ms`)
    assert.equal(lock.isHeld, true)
    assert.ok(lock.signal instanceof AbortSignal)
    assert.equal(lock.signal, lock.signal)
    assert.equal(lock.signal.aborted, false)
    assert.deepEqual([await lock.release(), await other.release()], [true, true])
  })

  test('release takes effect from the call on, returns true once, and never aborts the signal', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('released')
    const { signal } = lock
    const [first, second] = [lock.release(), lock.release()]
    assert.equal(lock.isHeld, false)
    assert.equal(lock.remainingMs, 0)
    assert.deepEqual(await Promise.all([first, second]), [true, false])
    assert.equal(await lock.release(), false)
    await assertFree(b, 'released')
    await sleep(20)
    assert.equal(signal.aborted, false)
    assert.equal(lock.signal.aborted, false)
  })

  test('a lock keeps its tokens and options after its release', async (store) => {
    const a = await store.connect()
    const about = (lock) => [lock.name, lock.token, lock.fencingToken, lock.transferable()]
    const options = { ttlMs: 20_000, metadata: { text: 'two words', more: [1, null] } }
    const lock = await a.acquire('kept', options)
    const held = about(lock)
    assert.equal(await lock.release(), true)
    assert.deepEqual(about(lock), held)
    assert.deepEqual([lock.isHeld, lock.remainingMs, lock.signal.aborted], [false, 0, false])
    const [job, during] = await a.using('kept', options, (job) => [job, about(job)])
    assert.deepEqual(about(job), during)
    assert.deepEqual([job.isHeld, await job.release(), job.signal.aborted], [false, false, false])
    await rejects(job.extend(1000), 'LOCK_LOST', { key: 'kept' })
  })

  test('asyncDispose releases the lock and never rejects', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('disposed')
    assert.equal(await lock[Symbol.asyncDispose](), undefined)
    assert.equal(lock.isHeld, false)
    await assertFree(b, 'disposed')
    assert.equal(await lock[Symbol.asyncDispose](), undefined)
    const lost = await a.acquire('disposed')
    await b.forceRelease('disposed')
    const theirs = await b.acquire('disposed')
    assert.equal(await lost[Symbol.asyncDispose](), undefined)
    assert.equal(await a.tryAcquire('disposed'), null)
    await theirs.release()
  })

  test('extend lengthens a lease and never shortens it', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('longer', { ttlMs: 5000, renew: false })
    assert.equal(await lock.extend(60_000), undefined)
    const longest = store.lasting(60_000)
    assert.ok(lock.remainingMs > longest * 0.66, `${lock.remainingMs} ms`)
    assert.ok((await b.inspect('longer')).remainingMs > longest * 0.66)
    await lock.extend(10)
    assert.ok(lock.remainingMs > longest / 2, `${lock.remainingMs} ms`)
    assert.ok((await b.inspect('longer')).remainingMs > longest / 2)
    assert.equal(await lock.release(), true)
  })

  test('extend sets the ttl of later renewals', async (store) => {
    const a = await store.connect()
    const lock = await a.acquire('raised', { ttlMs: 2000 })
    await lock.extend(4000)
    assert.equal(lock.transferable().ttlMs, 4000)
    const before = a.stats().renewed
    await until('a renewal', () => a.stats().renewed > before)
    assert.ok(lock.remainingMs > 2000, `${lock.remainingMs} ms`)
    assert.equal(await lock.release(), true)
  })

  test('extend rejects with LOCK_LOST when the lease has ended', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lost = { key: 'gone' }
    const expired = await a.acquire('gone', { ttlMs: 100, renew: false })
    const theirs = await b.acquire('gone', { waitMs: 10_000 })
    await rejects(expired.extend(60_000), 'LOCK_LOST', lost)
    assert.equal(theirs.isHeld, true)
    assert.equal(await theirs.release(), true)
    await rejects(theirs.extend(60_000), 'LOCK_LOST', lost)

    const forced = await a.acquire('gone')
    await b.forceRelease('gone')
    const next = await b.acquire('gone')
    await rejects(forced.extend(60_000), 'LOCK_LOST', lost)
    assert.equal(forced.isHeld, false)
    assert.equal(forced.signal.aborted, true)
    assert.equal(await forced.release(), false)
    assert.equal((await a.inspect('gone')).fencingToken, next.fencingToken)
    assert.equal(await next.release(), true)
  })

  test('a lock is lost at its next renewal after forceRelease', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('forced', { ttlMs: 2500 })
    let fired = 0
    lock.signal.addEventListener('abort', () => fired++)
    const aborted = once(lock.signal, 'abort')
    assert.equal(await b.forceRelease('forced'), true)
    const theirs = await b.acquire('forced')
    await aborted
    assertLockError(lock.signal.reason, 'LOCK_LOST', { key: 'forced' })
    assert.equal(lock.isHeld, false)
    assert.equal(lock.remainingMs, 0)
    assert.equal(await lock.release(), false)
    await sleep(50)
    assert.equal(fired, 1)
    assert.equal(theirs.isHeld, true)
    assert.equal((await a.inspect('forced')).fencingToken, theirs.fencingToken)
    assert.equal(await theirs.release(), true)
  })

  test('a lease is lost locally before the store grants the name again', async (store) => {
    const [a, b] = await store.connectAll(2)
    for (let round = 0; round < 4; round++) {
      const lock = await a.acquire('cautious', { ttlMs: 300, renew: false })
      const { signal } = lock
      const next = await b.acquire('cautious', { waitMs: 10_000 })
      assert.equal(lock.isHeld, false)
      assert.equal(lock.remainingMs, 0)
      assert.equal(signal.aborted, true)
      assertLockError(signal.reason, 'LOCK_LOST', { key: 'cautious' })
      assert.equal(await lock.release(), false)
      assert.equal(next.isHeld, true)
      assert.equal(await next.release(), true)
    }
  })

  test('lock.signal is aborted when it is first read after the loss', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('late', { ttlMs: 100, renew: false })
    await until('the loss', () => !lock.isHeld)
    assert.equal(lock.signal.aborted, true)
    assertLockError(lock.signal.reason, 'LOCK_LOST')
    assert.throws(() => lock.signal.throwIfAborted(), { code: 'LOCK_LOST' })
    await assertFree(b, 'late')
  })

  test('fencing tokens grow across release, expiry, forceRelease, close and reconnection', async (store) => {
    const tokens = []
    let a = await store.connect()
    const b = await store.connect()
    const acquire = async (service, options) => {
      const lock = await service.acquire('fence', { waitMs: 10_000, ...options })
      tokens.push(lock.fencingToken)
      return lock
    }
    for (let round = 0; round < 3; round++) {
      await (await acquire(a)).release()
      await acquire(b, { ttlMs: 150, renew: false })
      await acquire(a)
      await b.forceRelease('fence')
      await acquire(b)
      await a.forceRelease('fence')
      await a.using('fence', (lock) => tokens.push(lock.fencingToken))
      assert.equal(await a.acquireAndExecute('fence', (lock) => tokens.push(lock.fencingToken)), tokens.length)
      assert.equal(await b.acquireLock('fence'), true)
      await b.releaseLock('fence')
      const lock = await acquire(b)
      assert.equal((await a.inspect('fence')).fencingToken, lock.fencingToken)
      await lock.release()
      await acquire(a)
      await a.close()
      a = await store.connect()
    }
    // Without any service in between.
    await store.closeServices()
    a = await store.connect()
    await (await acquire(a)).release()
    assertGrowing(tokens)
  })

  test('restore accepts the result of transferable in another service', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const metadata = { job: 'report', tags: ['ä', 1, null] }
    const lock = await a.acquire('transferred', { ttlMs: 20_000, renew: false, metadata })
    const json = lock.transferable()
    assert.deepEqual(json, {
      names: ['transferred'],
      token: lock.token,
      fencingToken: String(lock.fencingToken),
      ttlMs: 20_000,
      renew: false,
      metadata,
    })
    const theirs = await b.restore(JSON.stringify(lock.transferable()))
    assert.notEqual(theirs.token, lock.token)
    assert.equal(theirs.fencingToken, lock.fencingToken)
    assert.equal(theirs.isHeld, true)
    assert.deepEqual(theirs.transferable(), { ...json, token: theirs.token })
    assert.deepEqual((await c.inspect('transferred')).metadata, metadata)
    assert.equal(await c.tryAcquire('transferred'), null)
    await theirs.extend(60_000)
    assert.equal(await theirs.release(), true)
    assert.equal(await lock.release(), false)
    await assertFree(c, 'transferred')
  })

  test('a wrong fencing token in the JSON of a transfer has no effect on later tokens', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    /** @type {(bigint | null)[]} */
    const tokens = []
    for (const isNew of [true, false]) {
      for (const error of [10n ** 9n, -(10n ** 9n), 1n, -1n]) {
        const lock = await a.acquire('transferred')
        tokens.push(lock.fencingToken)
        // A replica set writes the token of a new lease later.
        if (!isNew) assert.equal((await a.inspect('transferred')).fencingToken, lock.fencingToken)
        const waiter = later(c.acquire('transferred', { waitMs: 10_000 }))
        await waiting(c, 1)
        const wrong = String(lock.fencingToken + error > 0n ? lock.fencingToken + error : 1n)
        const theirs = await b.restore({ ...lock.transferable(), fencingToken: wrong })
        assert.equal((await a.inspect('transferred')).fencingToken, lock.fencingToken)
        assert.equal(await theirs.release(), true)
        const next = await waiter
        tokens.push(next.fencingToken)
        assert.equal(await next.release(), true)
      }
    }
    assertGrowing(tokens.map((token) => token ?? 0n))
  })

  test('after restore the earlier holder has lost the lock, and its renewal and close do not affect it', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const lock = await a.acquire('transferred', { ttlMs: 4500 })
    const aborted = new Promise((resolve) => lock.signal.addEventListener('abort', resolve))
    const theirs = await b.restore({ ...lock.transferable(), ttlMs: 60_000 })
    const keep = setTimeout(() => {}, 60_000)
    await aborted
    clearTimeout(keep)
    assert.equal(lock.signal.reason.code, 'LOCK_LOST')
    assert.equal(await lock.release(), false)
    await a.close()
    assert.equal(theirs.isHeld, true)
    assert.equal(await c.tryAcquire('transferred'), null)
    assert.equal(await theirs.release(), true)
  })

  test('restore keeps the renew option of the lock', async (store) => {
    const [a, b] = await store.connectAll(2)
    const json = (await a.acquire('kept', { ttlMs: 60_000 })).transferable()
    assert.equal(json.renew, true)
    const lock = await b.restore({ ...json, ttlMs: 4500 })
    assert.equal(b.stats().held, 1)
    await until('two renewals', () => b.stats().renewed >= 2)
    assert.equal(lock.isHeld, true)
    assert.equal(await lock.release(), true)
  })

  test('restore rejects when the lease ended before the blocked event loop received it', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('blocked', { ttlMs: 500, renew: false })
    const call = b.restore(lock.transferable())
    block(1000)
    await rejects(call, 'LOCK_LOST', { key: 'blocked' })
  })

  test('the result of transferable can be restored once', async (store) => {
    const services = await store.connectAll(4)
    const json = (await services[0].acquire('once', { renew: false })).transferable()
    const outcomes = await Promise.allSettled(services.map((service) => service.restore(json)))
    const [won, ...more] = outcomes.filter((result) => result.status === 'fulfilled')
    assert.equal(more.length, 0)
    for (const { reason } of outcomes.filter((result) => result.status === 'rejected')) {
      assertLockError(reason, 'LOCK_LOST', { key: 'once' })
    }
    assert.equal(won.value.isHeld, true)
    await won.value.extend(60_000)
    assert.equal(await won.value.release(), true)
    await assertFree(services[0], 'once')
  })

  test('restore rejects with LOCK_LOST when the lease has ended', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('gone', { renew: false })
    const json = lock.transferable()
    const stranger = { ...json, token: '0'.repeat(32) }
    await rejects(b.restore(stranger), 'LOCK_LOST', { key: 'gone' })
    await rejects(b.restore({ ...json, names: ['gone', 'more'] }), 'LOCK_LOST', { key: 'gone' })
    assert.equal(lock.isHeld, true)
    assert.equal(await b.inspect('more'), null)
    assert.equal(await b.tryAcquire('gone', { waitMs: SOON_MS }), null)
    assert.equal(await lock.release(), true)
    await rejects(b.restore(json), 'LOCK_LOST', { key: 'gone' })
    const next = await a.acquire('gone')
    await rejects(b.restore(JSON.stringify(json)), 'LOCK_LOST', { key: 'gone' })
    assert.equal(next.isHeld, true)
    assert.equal(await next.release(), true)
    assert.equal(b.stats().held, 0)
  })
}
