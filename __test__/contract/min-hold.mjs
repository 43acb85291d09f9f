// minHoldMs: a name stays busy after its release. On a store that cannot keep it beyond the process, it is refused.
import assert from 'node:assert/strict'
import { assertFree, rejects, sleep, until } from '../tools.mjs'

export function minHold(test) {
  test('minHoldMs keeps the name busy after an early release', async (store) => {
    const [a, b] = await store.connectAll(2)
    const began = performance.now()
    const lock = await a.acquire('skewed', { minHoldMs: 1500 })
    assert.equal(await lock.release(), true)
    assert.equal(lock.isHeld, false)
    assert.equal(await lock.release(), false)
    for (const service of [a, b]) assert.equal(await service.tryAcquire('skewed'), null)
    await rejects(lock.extend(60_000), 'LOCK_LOST')
    await rejects(b.restore(lock.transferable()), 'LOCK_LOST')
    const next = await b.acquire('skewed', { waitMs: 20_000 })
    assert.ok(performance.now() - began >= 1490, 'released too early')
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
    assert.equal(await a.acquireAndExecute({ name: 'skewed', ttlSeconds: 60, minHoldMs: 1000 }, () => 'ran'), 'ran')
    assert.equal(await b.acquireAndExecute('skewed', () => 'ran again'), undefined)
    await until('the end of minHoldMs', () => b.acquireAndExecute('skewed', () => 'ran again'))
    assert.ok(performance.now() - began >= 990, 'released too early')
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

export function noMinHold(test) {
  test('minHoldMs and oncePer are refused before the lock is acquired', async (store) => {
    const [a, kept] = [await store.connect(), await store.connect({ defaults: { minHoldMs: 1000 } })]
    const job = () => assert.fail('fn was called')
    const calls = {
      minHoldMs: [
        a.acquire('n', { minHoldMs: 1 }),
        a.acquireAndExecute({ name: 'n', minHoldMs: '1s' }, job),
        kept.using('n', job),
        kept.acquireLock('n'),
      ],
      periodMs: [a.oncePer('n', { periodMs: '1h' }, job), kept.oncePer('n', { periodMs: '1h' }, job)],
    }
    for (const [option, refused] of Object.entries(calls))
      for (const call of refused) {
        const { message } = await rejects(call, 'LOCK_INVALID_ARGUMENT')
        assert.match(message, new RegExp(`^${option} needs another store, because .* close\\(\\), got \\w+$`))
      }
    assert.equal(await kept.using('n', { minHoldMs: 0 }, () => 'ran'), 'ran')
    await assertFree(a, 'n')
  })
}
