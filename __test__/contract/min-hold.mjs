// minHoldMs: a name stays busy after its release.
import assert from 'node:assert/strict'
import { assertFree, rejects, sleep, until, waiting } from '../tools.mjs'

export function minHold(test) {
  test('minHoldMs keeps the name busy after an early release', async (store) => {
    const [a, b] = await store.connectAll(2)
    const began = performance.now()
    const lock = await a.acquire('skewed', { minHoldMs: 2500 })
    assert.equal(await lock.release(), true)
    assert.equal(lock.isHeld, false)
    assert.equal(await lock.release(), false)
    for (const service of [a, b]) assert.equal(await service.tryAcquire('skewed'), null)
    await rejects(lock.extend(60_000), 'LOCK_LOST')
    await rejects(b.restore(lock.transferable()), 'LOCK_LOST')
    const next = await b.acquire('skewed', { waitMs: 20_000 })
    assert.ok(performance.now() - began >= 2490, 'released too early')
    assert.ok(performance.now() - began < 10_000, 'the name stayed busy for the whole ttl')
    assert.ok(next.fencingToken > lock.fencingToken)
    assert.equal(await next.release(), true)
  })

  test('minHoldMs may be longer than the ttl, and forceRelease ends it', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('skewed', { ttlMs: 500, minHoldMs: 60_000 })
    assert.equal(await lock.release(), true)
    await sleep(800)
    assert.equal(await b.tryAcquire('skewed'), null)
    assert.equal(await b.forceRelease('skewed'), true)
    await assertFree(b, 'skewed')
  })

  test('minHoldMs outlasts close(), and a call that waits then gets the name', async (store) => {
    const [released, closed, b] = await store.connectAll(3)
    const began = performance.now()
    const locks = [
      await released.acquire('released', { minHoldMs: 2500 }),
      await closed.acquire('closed', { minHoldMs: 2500 }),
    ]
    const waits = locks.map(({ name }) => b.acquire(name, { waitMs: 30_000 }))
    await waiting(b, 2)
    assert.equal(await locks[0].release(), true)
    await Promise.all([released.close(), closed.close()])
    for (const [index, wait] of waits.entries()) {
      const next = await wait
      assert.ok(performance.now() - began >= 2490, 'released too early')
      assert.ok(next.fencingToken > locks[index].fencingToken)
      assert.equal(await next.release(), true)
    }
    assert.deepEqual(await b.list(), [])
  })

  test('minHoldMs has no effect after that time, or on a wait', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('passed', { minHoldMs: 100 })
    const late = rejects(b.acquire('passed', { waitMs: 150, minHoldMs: 60_000 }), 'LOCK_TIMEOUT')
    await late
    assert.equal(await lock.release(), true)
    // A store may hand the name off to the call that has just timed out, which releases it at once.
    await assertFree(b, 'passed')
  })

  test('acquireAndExecute keeps the name busy for minHoldMs', async (store) => {
    const [a, b] = await store.connectAll(2)
    const began = performance.now()
    assert.equal(await a.acquireAndExecute({ name: 'skewed', ttlSeconds: 60, minHoldMs: 2500 }, () => 'ran'), 'ran')
    assert.equal(await b.acquireAndExecute('skewed', () => 'ran again'), undefined)
    await until('the end of minHoldMs', () => b.acquireAndExecute('skewed', () => 'ran again'))
    assert.ok(performance.now() - began >= 2490, 'released too early')
  })

  test('the default of minHoldMs applies to every function that acquires', async (store) => {
    store.mayLeaveLocks = true
    const b = await store.connect()
    const kept = await store.connect({ defaults: { minHoldMs: 60_000 } })
    await (await kept.acquire('acquire')).release()
    await kept.using('using', () => {})
    await kept.acquireAndExecute('execute', () => {})
    assert.equal(await kept.acquireLock('gist'), true)
    assert.equal(await kept.releaseLock('gist'), true)
    for (const name of ['acquire', 'using', 'execute', 'gist']) assert.equal(await b.tryAcquire(name), null, name)
  })
}
