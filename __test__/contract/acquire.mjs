// acquire and tryAcquire: waiting, wake-ups, order, and timeouts and aborts that leave nothing behind.
import assert from 'node:assert/strict'
import { assertFree, assertGrowing, rejection, rejects, sleep, SOON_MS, timed, until, waiting } from '../tools.mjs'

export function acquire(test, { ordered }) {
  test('tryAcquire makes one attempt and never waits', async (store) => {
    const events = []
    const [a, b] = [await store.connect(), await store.connect({ onEvent: ({ type }) => events.push(type) })]
    const lock = await a.tryAcquire('one')
    assert.equal(lock.isHeld, true)
    assert.equal(await a.tryAcquire('one'), null)
    assert.equal(await b.tryAcquire('one', { waitMs: 60_000 }), null)
    assert.ok(!events.includes('waiting'), 'it waited')
    assert.equal(await lock.release(), true)
    const next = await b.tryAcquire('one')
    assert.equal(await next.release(), true)
  })

  test('one of many concurrent tryAcquire calls is granted', async (store) => {
    const services = await store.connectAll(3)
    const locks = await Promise.all(Array.from({ length: 30 }, (_, i) => services[i % 3].tryAcquire('race')))
    const won = locks.filter((lock) => lock !== null)
    assert.equal(won.length, 1)
    assert.equal(await won[0].release(), true)
  })

  test('acquire rejects with LOCK_TIMEOUT after waitMs', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('busy')
    for (const service of [a, b]) {
      for (const waitMs of [0, 1, 250]) {
        // Start before the call: the machine may stand still right after it.
        const began = performance.now()
        const error = await rejects(service.acquire('busy', { waitMs }), 'LOCK_TIMEOUT', {
          key: 'busy',
          retryable: true,
        })
        assert.ok(performance.now() - began >= waitMs - 5, `rejected before ${waitMs} ms`)
        assert.match(error.message, /busy/)
      }
    }
    assert.equal(await lock.release(), true)
    await assertFree(b, 'busy')
    assert.equal(b.stats().waiting, 0)
  })

  test('acquire with waitMs 0 is granted a free name', async (store) => {
    const a = await store.connect()
    const lock = await a.acquire('free', { waitMs: 0 })
    assert.equal(await lock.release(), true)
  })

  test('a waiter is woken by the release of another service', async (store) => {
    const [a, b] = await store.connectAll(2)
    for (let round = 0; round < 3; round++) {
      const lock = await a.acquire('woken')
      const next = b.acquire('woken', { waitMs: Infinity })
      await waiting(b, 1)
      await sleep(50 * round)
      assert.equal(await lock.release(), true)
      const took = await timed(next)
      assert.ok(took < SOON_MS, `woken after ${took} ms`)
      assert.equal(await (await next).release(), true)
    }
  })

  test('a waiter is woken by releaseLock, forceRelease, close, and expiry', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const wakers = [() => a.releaseLock('woken'), () => c.forceRelease('woken'), () => {}, () => a.close()]
    for (const [round, wake] of wakers.entries()) {
      assert.equal(await a.acquireLock('woken', round === 2 ? 4.5 : 60), true)
      const next = b.acquire('woken', { waitMs: 60_000 })
      await waiting(b, 1)
      await wake()
      const took = await timed(next)
      assert.ok(took < SOON_MS + (round === 2 ? 4500 : 0), `woken after ${took} ms in round ${round}`)
      assert.equal(await (await next).release(), true)
    }
  })

  test('the waiters of one service are served in the order of arrival', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('fifo')
    const served = []
    const calls = []
    for (let i = 0; i < 8; i++) {
      const call = b.using('fifo', { waitMs: 60_000 }, ({ fencingToken }) => served.push([i, fencingToken]))
      calls.push(call)
      await waiting(b, i + 1)
    }
    assert.equal(await lock.release(), true)
    await Promise.all(calls)
    assert.deepEqual(
      served.map(([i]) => i),
      [0, 1, 2, 3, 4, 5, 6, 7],
    )
    assertGrowing([lock.fencingToken, ...served.map(([, token]) => token)])
  })

  if (ordered) {
    test('the waiters of all services are served in the order of arrival', async (store) => {
      const services = await store.connectAll(4)
      const lock = await services[0].acquire('queue')
      let tried = () => {}
      const hasTried = new Promise((resolve) => (tried = () => resolve(undefined)))
      const served = []
      const calls = []
      for (let i = 0; i < 12; i++) {
        const service = services[i % 4]
        const before = service.stats().waiting
        calls.push(
          service.using('queue', { waitMs: 60_000 }, async () => {
            served.push(i)
            // The first one holds the name until `tryAcquire` has answered.
            await (i === 0 ? hasTried : sleep(2))
          }),
        )
        await waiting(service, before + 1)
        // A call counts as waiting once its first attempt was answered: then it has its position in the queue.
      }
      assert.equal(await lock.release(), true)
      // tryAcquire never overtakes a waiter.
      assert.equal(await services[1].tryAcquire('queue'), null)
      tried()
      await Promise.all(calls)
      assert.deepEqual(served, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    })
  }

  test('a hundred waiters of one service for one name are served one at a time', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('hundred')
    const tokens = []
    let inside = 0
    const calls = Array.from({ length: 100 }, () =>
      b.using('hundred', { waitMs: 80_000 }, async ({ fencingToken }) => {
        assert.equal(++inside, 1)
        tokens.push(fencingToken)
        await sleep(1)
        inside--
      }),
    )
    await waiting(b, 100)
    assert.equal(await lock.release(), true)
    await Promise.all(calls)
    assert.equal(tokens.length, 100)
    assertGrowing([lock.fencingToken, ...tokens])
    assert.equal(b.stats().waiting, 0)
    assert.equal(b.stats().held, 0)
  })

  test('services that increment an unprotected counter under a lock lose no increment', async (store) => {
    const services = await store.connectAll(3)
    const tokens = []
    let counter = 0
    const work = async (service) => {
      for (let i = 0; i < 8; i++) {
        await service.using('counter', { waitMs: 60_000 }, async ({ fencingToken }) => {
          const read = counter
          tokens.push(fencingToken)
          await sleep(1)
          counter = read + 1
        })
      }
    }
    await Promise.all(services.flatMap((service) => [work(service), work(service)]))
    assert.equal(counter, 48)
    assertGrowing(tokens)
  })

  test('acquire that timed out leaves no lock', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const lock = await a.acquire('left')
    await rejects(b.acquire('left', { waitMs: 100 }), 'LOCK_TIMEOUT')
    assert.equal(await lock.release(), true)
    await assertFree(c, 'left')
    assert.equal(b.stats().held, 0)
  })

  test("an aborted wait rejects with the signal's reason and leaves no lock", async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const lock = await a.acquire('left')
    for (const settle of [() => {}, () => sleep(20), () => waiting(b, 1)]) {
      const controller = new AbortController()
      const call = rejection(b.acquire('left', { waitMs: Infinity, signal: controller.signal }))
      await settle()
      const reason = new Error('enough')
      controller.abort(reason)
      assert.equal(await call, reason)
    }
    await waiting(b, 0)
    assert.equal(await lock.release(), true)
    await assertFree(c, 'left')
    assert.equal(b.stats().held, 0)
  })

  test('the waiter behind an aborted waiter is served', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const lock = await a.acquire('chain')
    const controller = new AbortController()
    const gone = rejection(b.acquire('chain', { waitMs: Infinity, signal: controller.signal }))
    await waiting(b, 1)
    const next = c.acquire('chain', { waitMs: 60_000 })
    await waiting(c, 1)
    controller.abort()
    await gone
    assert.equal(await lock.release(), true)
    const took = await timed(next)
    assert.ok(took < SOON_MS, `served after ${took} ms`)
    assert.equal(await (await next).release(), true)
  })

  test('an abort at any moment of an acquisition leaves no lock without a holder', async (store) => {
    const [a, b] = await store.connectAll(2)
    for (let round = 0; round < 24; round++) {
      const controller = new AbortController()
      const reason = new Error(`round ${round}`)
      const call = a.acquire('mayfly', { waitMs: 60_000, signal: controller.signal })
      const abort = () => controller.abort(reason)
      if (round % 4 === 0) abort()
      else if (round % 4 === 1) setImmediate(abort)
      else setTimeout(abort, round / 8)
      const outcome = await call.catch((thrown) => thrown)
      if (outcome === reason) await assertFree(b, 'mayfly')
      else assert.equal(await outcome.release(), true)
    }
    await until('nothing is held', async () => a.stats().held === 0 && (await b.list()).length === 0)
  })

  test('acquire with a ttl of one or two milliseconds rejects for good and leaves no lock', async (store) => {
    const [a, b] = await store.connectAll(2)
    for (let round = 0; round < 5; round++) {
      const key = `blink ${round}`
      // No grant of so short a lease can arrive in time: a loop on `retryable` ends.
      const late = await rejects(a.tryAcquire(key, { ttlMs: 1 + (round % 2) }), 'LOCK_STORE', { key, retryable: false })
      assert.match(late.message, /granted too late.*at least 3 ms/)
    }
    const unending = a.acquire('blink', { ttlMs: 1, waitMs: Infinity, onStoreError: 'wait' })
    const late = await rejects(unending, 'LOCK_STORE', { key: 'blink', retryable: false })
    assert.match(late.message, /granted too late/)
    const job = () => assert.fail('the job ran without a lease')
    await rejects(a.acquireAndExecute({ name: 'flash', ttlSeconds: 0.001 }, job), 'LOCK_STORE', { retryable: false })
    await assertFree(b, 'blink')
    assert.deepEqual(await b.list(), [])
    assert.equal(a.stats().held, 0)
  })

  test('a lease that expired before the blocked event loop received it is not returned', async (store) => {
    const [a, b] = await store.connectAll(2)
    const brief = { ttlMs: 300, renew: false }
    /** Blocks the event loop for longer than the ttl, at once or after the call was sent. Resolves to `undefined` if the call settled before. */
    const late = async (inFlight, call) => {
      let isSettled = false
      const settled = Promise.allSettled([call()]).finally(() => (isSettled = true))
      if (inFlight) await new Promise(setImmediate)
      if (isSettled) return
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 700)
      return (await settled)[0]
    }
    /** Allows a lease that is held, busy as a value, or a `LOCK_STORE` error. */
    const check = (result, busy, isHeld) => {
      if (result === undefined || isHeld(result.value) || (result.value === busy && !result.reason)) return
      assert.equal(result.reason?.code, 'LOCK_STORE', result.reason?.message ?? `settled with ${result.value}`)
      assert.match(result.reason.message, /granted too late/)
    }
    for (const inFlight of [false, true]) {
      const gist = await late(inFlight, () => a.acquireLock('gist', 0.3))
      const settledAt = performance.now()
      const released = await a.releaseLock('gist')
      // A machine that stands still may delay the release until the lease has ended.
      const isLate = performance.now() - settledAt > 300
      check(gist, false, (value) => value === true && (released || isLate))
      check(await late(inFlight, () => a.tryAcquire('try', brief)), null, (lock) => lock?.isHeld)
      const job = async ({ isHeld }) => isHeld
      check(
        await late(inFlight, () => a.acquireAndExecute({ name: 'job', ttlSeconds: 0.3 }, job)),
        undefined,
        (ran) => ran,
      )
      const waited = await late(inFlight, () => a.acquire('wait', { ...brief, waitMs: 60_000 }))
      assert.equal(
        waited?.status === 'rejected' ? waited.reason : undefined,
        undefined,
        'there was time for another attempt',
      )
      assert.equal(await a.using('using', { ttlMs: 30_000 }, job), true)
      for (const name of ['try', 'job', 'wait']) await assertFree(b, name)
    }
  })

  test('names are compared byte by byte', async (store) => {
    const [a, b] = await store.connectAll(2)
    const names = [
      'x',
      'X',
      ' x',
      'x ',
      'x\n',
      'x\0',
      '\0',
      'n'.repeat(512),
      `${'n'.repeat(511)}m`,
      'é',
      'e\u0301',
      'É',
      'ß',
      'ss',
      '鎖'.repeat(170),
      '🔒'.repeat(128),
      '{}',
      '{x}',
      '{x}y',
      '*',
      '?',
      '[x]',
      '%',
      '_',
      '\\',
      '"',
      "'",
      '`',
      ':',
      '/',
      '.',
      '$where',
      '$$NOW',
      'a.b',
      '__proto__',
      'constructor',
      'null',
      '1',
      '1.0',
      'lock:x',
      '\u200b',
      '\ufeff',
      '\x7f',
    ]
    const locks = await Promise.all(names.map((name) => a.acquire(name, { waitMs: 5000 })))
    for (const [i, name] of names.entries()) {
      assert.equal(locks[i].name, name)
      assert.equal((await b.inspect(name))?.fencingToken, locks[i].fencingToken, JSON.stringify(name))
    }
    assert.deepEqual((await b.list()).map((info) => info.name).sort(), [...names].sort())
    assert.deepEqual(
      await Promise.all(locks.map((lock) => lock.release())),
      names.map(() => true),
    )
  })
}
