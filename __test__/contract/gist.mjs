// The gist's three functions: seconds, one attempt, not re-entrant, never another holder's lock.
import assert from 'node:assert/strict'
import { assertFree, rejection, rejects, sleep, until } from '../tools.mjs'

/** Acquires a name for 0.2 s. Retries when the grant arrives after the end of the lease because the machine stalled. */
const briefly = (service, name) =>
  until('a grant in time', () =>
    service.acquireLock(name, 0.2).catch((error) => assert.match(error.message, /too late/)),
  )

export function gist(test) {
  test('acquireLock returns true for one service only, and is not re-entrant', async (store) => {
    const [a, b] = await store.connectAll(2)
    assert.equal(await a.acquireLock('report', 60), true)
    assert.equal(await b.acquireLock('report', 60), false)
    assert.equal(await a.acquireLock('report', 60), false)
    assert.equal(await b.acquireLock('other', 60), true)
    assert.equal(await a.releaseLock('report'), true)
    assert.equal(await b.acquireLock('report', 60), true)
  })

  test('one of many concurrent acquireLock calls returns true', async (store) => {
    const services = await store.connectAll(3)
    for (let round = 0; round < 3; round++) {
      const calls = Array.from({ length: 30 }, (_, i) => services[i % 3].acquireLock('race', 60))
      const answers = await Promise.all(calls)
      assert.equal(answers.filter(Boolean).length, 1)
      assert.equal(await services[answers.indexOf(true) % 3].releaseLock('race'), true)
    }
  })

  test('acquireLock has a default ttl of 30 s', async (store) => {
    const a = await store.connect()
    assert.equal(await a.acquireLock('default'), true)
    assert.equal(await a.acquireLock('undefined', undefined), true)
    const longest = store.lasting(30_000)
    for (const name of ['default', 'undefined']) {
      const { remainingMs } = await a.inspect(name)
      assert.ok(remainingMs > longest * 0.66 && remainingMs <= longest, `${remainingMs} ms`)
    }
  })

  test('acquireLock accepts fractions of seconds and does not renew the lease', async (store) => {
    const [a, b] = await store.connectAll(2)
    assert.equal(await a.acquireLock('short', 2.5), true)
    const { remainingMs } = await b.inspect('short')
    assert.ok(remainingMs > 0 && remainingMs <= store.lasting(2500), `${remainingMs} ms`)
    await until('the end of the ttl', () => b.acquireLock('short', 60))
    assert.equal(await a.acquireLock('short', 60), false)
  })

  test('acquireLock with a ttl of one millisecond rejects and leaves no lock', async (store) => {
    const [a, b] = await store.connectAll(2)
    await rejects(a.acquireLock('blink', 0.001), 'LOCK_STORE', { retryable: false })
    await rejects(a.acquireLock('flash', 0.0000001), 'LOCK_STORE', { retryable: false })
    await assertFree(b, 'blink')
    await assertFree(b, 'flash')
    assert.deepEqual(await b.list(), [])
  })

  test('releaseLock returns true once for a name that this service acquired', async (store) => {
    const [a, b] = await store.connectAll(2)
    assert.equal(await a.releaseLock('never'), false)
    assert.equal(await a.acquireLock('mine', 60), true)
    assert.equal(await a.releaseLock('mine'), true)
    assert.equal(await a.releaseLock('mine'), false)
    await assertFree(b, 'mine')
  })

  test('releaseLock never releases another holder’s lock', async (store) => {
    const [a, b] = await store.connectAll(2)
    assert.equal(await a.acquireLock('theirs', 60), true)
    assert.equal(await b.releaseLock('theirs'), false)
    assert.equal(await b.acquireLock('theirs', 60), false)
    // Nor a lock that the same service acquired with acquire.
    const lock = await a.acquire('lock')
    assert.equal(await a.releaseLock('lock'), false)
    assert.equal(await b.tryAcquire('lock'), null)
    assert.equal(await lock.release(), true)
  })

  test('releaseLock returns false after the lease expired, and after another service acquired the name', async (store) => {
    const [a, b] = await store.connectAll(2)
    await briefly(a, 'expired')
    await until('expiry', async () => (await b.inspect('expired')) === null)
    assert.equal(await a.releaseLock('expired'), false)

    await briefly(a, 'taken')
    await until('b acquires the name', () => b.acquireLock('taken', 60))
    assert.equal(await a.releaseLock('taken'), false)
    assert.equal(await a.acquireLock('taken', 60), false, 'b must still hold it')
    assert.equal(await b.releaseLock('taken'), true)
  })

  test('releaseLock returns false after forceRelease', async (store) => {
    const [a, b] = await store.connectAll(2)
    assert.equal(await a.acquireLock('forced', 60), true)
    assert.equal(await b.forceRelease('forced'), true)
    assert.equal(await b.acquireLock('forced', 60), true)
    assert.equal(await a.releaseLock('forced'), false)
    assert.equal(await a.acquireLock('forced', 60), false)
  })

  test('a service acquires the same name again after expiry', async (store) => {
    const a = await store.connect()
    await briefly(a, 'again')
    await until('expiry', () => a.acquireLock('again', 60))
    assert.equal(await a.releaseLock('again'), true)
    assert.equal(await a.inspect('again'), null)
  })

  test('acquireAndExecute runs fn under the lock, in each of its forms', async (store) => {
    const [a, b] = await store.connectAll(2)
    /** @type {[number, (fn: any) => Promise<any>][]} */
    const forms = [
      [60_000, (fn) => a.acquireAndExecute({ name: 'job', ttlSeconds: 60 }, fn)],
      [30_000, (fn) => a.acquireAndExecute({ name: 'job' }, fn)],
      [7500, (fn) => a.acquireAndExecute('job', 7.5, fn)],
      [30_000, (fn) => a.acquireAndExecute('job', undefined, fn)],
      [30_000, (fn) => a.acquireAndExecute('job', fn)],
    ]
    for (const [ttl, call] of forms) {
      const result = { any: 'object' }
      const given = await call(async (...args) => {
        assert.equal(args.length, 1)
        const [{ signal, fencingToken, name, isHeld }] = args
        assert.equal(signal.aborted, false)
        assert.equal(typeof fencingToken, 'bigint')
        assert.equal(name, 'job')
        assert.equal(isHeld, true)
        const info = await b.inspect('job')
        assert.equal(info.fencingToken, fencingToken)
        const longest = store.lasting(ttl)
        assert.ok(
          info.remainingMs <= longest && info.remainingMs > longest - 5000,
          `${info.remainingMs} of ${longest} ms`,
        )
        assert.equal(await b.acquireLock('job'), false)
        return result
      })
      assert.equal(given, result)
      await assertFree(b, 'job')
    }
  })

  test('acquireAndExecute resolves to undefined without calling fn when the name is busy', async (store) => {
    const [a, b] = await store.connectAll(2)
    await a.acquireLock('busy', 60)
    const never = () => assert.fail('fn was called')
    for (const service of [a, b]) {
      assert.equal(await service.acquireAndExecute('busy', never), undefined)
      assert.equal(await service.acquireAndExecute('busy', 5, never), undefined)
      assert.equal(await service.acquireAndExecute({ name: 'busy' }, never), undefined)
    }
    // Not re-entrant either.
    const outer = await a.acquireAndExecute('nested', async () => {
      assert.equal(await a.acquireAndExecute('nested', never), undefined)
      return 'outer'
    })
    assert.equal(outer, 'outer')
  })

  test('acquireAndExecute releases the lock and rethrows what fn threw', async (store) => {
    const [a, b] = await store.connectAll(2)
    const thrown = new Error('from the job')
    const sync = () => {
      throw thrown
    }
    const async = async () => {
      await sleep(1)
      throw thrown
    }
    for (const fn of [sync, async]) {
      assert.equal(await rejection(a.acquireAndExecute('throws', fn)), thrown)
      await assertFree(b, 'throws')
    }
  })

  test('acquireAndExecute does not renew: the next holder waits for the ttl at most', async (store) => {
    const [a, b] = await store.connectAll(2)
    const done = await a.acquireAndExecute('long', 1.5, async (lock) => {
      const next = await b.acquire('long', { waitMs: 10_000 })
      assert.equal(lock.isHeld, false)
      assert.equal(lock.signal.aborted, true)
      return next
    })
    assert.equal(done.isHeld, true, 'a must not have released what b holds')
    assert.equal(await a.tryAcquire('long'), null)
    assert.equal(await done.release(), true)
  })

  test('acquireAndExecute with renew: true renews while fn runs', async (store) => {
    const [a, b] = await store.connectAll(2)
    const renewed = await a.acquireAndExecute({ name: 'kept', ttlSeconds: 3.5, renew: true }, async (lock) => {
      const end = Date.now() + 5000
      while (Date.now() < end) {
        assert.equal(await b.acquireLock('kept'), false)
        await sleep(50)
      }
      return lock.isHeld
    })
    assert.equal(renewed, true)
  })

  test('acquireAndExecute with waitMs waits for a busy name', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('wait')
    const began = performance.now()
    assert.equal(
      await b.acquireAndExecute({ name: 'wait', waitMs: 150 }, () => assert.fail('fn was called')),
      undefined,
    )
    assert.ok(performance.now() - began >= 145)
    const call = b.acquireAndExecute({ name: 'wait', waitMs: 10_000 }, () => 'done')
    await until('b waits', () => b.stats().waiting === 1)
    await lock.release()
    assert.equal(await call, 'done')
  })

  test("acquireAndExecute rejects with the signal's reason when its wait is aborted", async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('aborted')
    const controller = new AbortController()
    const options = { name: 'aborted', waitMs: Infinity, signal: controller.signal }
    const call = rejection(b.acquireAndExecute(options, () => assert.fail('fn was called')))
    await until('b waits', () => b.stats().waiting === 1)
    const reason = { any: 'thing' }
    controller.abort(reason)
    assert.equal(await call, reason)
    await lock.release()
    await assertFree(a, 'aborted')
  })
}
