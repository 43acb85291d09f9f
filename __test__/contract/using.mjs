// using: acquire, renew, run, release.
import assert from 'node:assert/strict'
import { assertFree, rejection, rejects, sleep, until, waiting } from '../tools.mjs'

export function using(test) {
  test('using runs fn under the lock, in each of its forms', async (store) => {
    const [a, b] = await store.connectAll(2)
    for (const call of [
      (fn) => a.using('used', { ttlMs: 60_000 }, fn),
      (fn) => a.using('used', undefined, fn),
      (fn) => a.using('used', fn),
      (fn) => a.using(['used'], {}, fn),
    ]) {
      const result = { any: 'object' }
      const given = await call(async (lock, ...rest) => {
        assert.deepEqual(rest, [])
        assert.equal(lock.name, 'used')
        assert.equal(lock.isHeld, true)
        assert.equal(lock.transferable().renew, true)
        assert.equal(await b.tryAcquire('used'), null)
        return result
      })
      assert.equal(given, result)
      await assertFree(b, 'used')
    }
  })

  test('using waits for a busy name, and rejects with LOCK_TIMEOUT without calling fn', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('busy')
    const never = () => assert.fail('fn was called')
    for (const waitMs of [0, 80]) {
      await rejects(b.using('busy', { waitMs }, never), 'LOCK_TIMEOUT', { key: 'busy', retryable: true })
    }
    const controller = new AbortController()
    const aborted = rejection(b.using('busy', { waitMs: Infinity, signal: controller.signal }, never))
    await waiting(b, 1)
    controller.abort('enough')
    assert.equal(await aborted, 'enough')
    const call = b.using('busy', () => 'done')
    await waiting(b, 1)
    await lock.release()
    assert.equal(await call, 'done')
  })

  test('using releases the lock and rethrows what fn threw', async (store) => {
    const [a, b] = await store.connectAll(2)
    const thrown = new Error('from fn')
    const sync = () => {
      throw thrown
    }
    for (const fn of [sync, async () => sync()]) {
      assert.equal(await rejection(a.using('throws', fn)), thrown)
      await assertFree(b, 'throws')
    }
  })

  test('using renews while fn runs', async (store) => {
    const [a, b] = await store.connectAll(2)
    await a.using('renewed', { ttlMs: 4500 }, async (lock) => {
      const end = Date.now() + 5500
      while (Date.now() < end) {
        assert.equal(await b.tryAcquire('renewed'), null)
        await sleep(50)
      }
      assert.equal(lock.isHeld, true)
      assert.equal(lock.signal.aborted, false)
    })
    assert.ok(a.stats().renewed >= 2)
  })

  test('using rejects with LOCK_LOST after fn has settled', async (store) => {
    const [a, b] = await store.connectAll(2)
    let settled = false
    const call = a.using('lost', { ttlMs: 2000 }, async (lock) => {
      assert.equal(await b.forceRelease('lost'), true)
      await until('the loss', () => lock.signal.aborted)
      await sleep(50)
      settled = true
      return 'this result is dropped'
    })
    const error = await rejects(call, 'LOCK_LOST', { key: 'lost' })
    assert.equal(settled, true)
    assert.equal('cause' in error, false)
  })

  test('LOCK_LOST of using has what fn threw as its cause', async (store) => {
    const [a, b] = await store.connectAll(2)
    for (const thrown of [new Error('from fn'), undefined, 'text']) {
      const call = a.using('lost', { ttlMs: 600 }, async (lock) => {
        await b.forceRelease('lost')
        await until('the loss', () => lock.signal.aborted)
        throw thrown
      })
      const error = await rejects(call, 'LOCK_LOST', { key: 'lost' })
      assert.equal('cause' in error, true)
      assert.equal(error.cause, thrown)
    }
  })

  test('using rejects with LOCK_LOST when the release finds that the store does not hold the lock', async (store) => {
    const [a, b] = await store.connectAll(2)
    let theirs
    const call = a.using('taken', { ttlMs: 60_000 }, async () => {
      await b.forceRelease('taken')
      theirs = await b.acquire('taken')
    })
    await rejects(call, 'LOCK_LOST', { key: 'taken' })
    assert.equal((await a.inspect('taken')).fencingToken, theirs.fencingToken)
    assert.equal(await theirs.release(), true)
  })

  test('using rejects with LOCK_LOST when the lease expired', async (store) => {
    const [a, b] = await store.connectAll(2)
    let theirs
    const call = a.using('expired', { ttlMs: 200, renew: false }, async () => {
      theirs = await b.acquire('expired', { waitMs: 10_000 })
    })
    await rejects(call, 'LOCK_LOST', { key: 'expired' })
    assert.equal(await theirs.release(), true)
  })

  test('fn may release the lock itself', async (store) => {
    const [a, b] = await store.connectAll(2)
    const given = await a.using('early', async (lock) => {
      assert.equal(await lock.release(), true)
      await assertFree(b, 'early')
      return 'done'
    })
    assert.equal(given, 'done')
  })

  test('using accepts several names', async (store) => {
    const [a, b] = await store.connectAll(2)
    await a.using(['u1', 'u2'], async (lock) => {
      assert.deepEqual(lock.names, ['u1', 'u2'])
      assert.equal(await b.tryAcquire('u2'), null)
    })
    await assertFree(b, 'u1')
    await assertFree(b, 'u2')
  })
}
