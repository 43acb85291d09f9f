// A failover of a MongoDB replica set: held locks, waiters, and calls during the election.
import assert from 'node:assert/strict'
import { LockService } from '../index.js'
import {
  FAILOVER_TIMEOUT_MS,
  SLACK_MS,
  FAULTS,
  FAST_MONITORING,
  advanceClusterTime,
  replicaSetSuite,
  newPrimary,
  withoutPrimary,
} from './replica-set.mjs'
import { assertGrowing, inspectHeld, later, rejection, rejects, sleep, until, waiting } from './tools.mjs'

/** With this limit calls wait until the election has ended. */
const LONG_TIMEOUT = { storeTimeoutMs: FAILOVER_TIMEOUT_MS }

replicaSetSuite('leases across a failover', {}, (test) => {
  for (const [what, { begin, end, ttlMs }] of Object.entries(FAULTS)) {
    test(`a lock granted before ${what} is held after it`, async ({ set, connect }) => {
      const events = []
      const url = set.url + FAST_MONITORING
      const holder = await connect({ ...LONG_TIMEOUT, onEvent: (event) => events.push(event) }, url)
      const other = await connect(LONG_TIMEOUT, url)
      const renewed = await holder.acquire('renewed', { ttlMs })
      const renewedSince = performance.now()
      const long = await holder.acquire('long', { ttlMs: 120_000, renew: false })
      const several = await holder.acquire(['one', 'two'], { ttlMs: 120_000, renew: false })
      assert.equal(await holder.acquireLock('gist', 120), true)
      const names = ['gist', 'long', 'one', 'renewed', 'two']
      const tokens = Object.fromEntries((await other.list()).map(({ name, fencingToken }) => [name, fencingToken]))
      assert.deepEqual(Object.keys(tokens).sort(), names)
      const waiters = ['long', 'renewed', 'two'].map((name) => later(other.acquire(name, { waitMs: 150_000 })))
      await waiting(other, 3)

      // Just granted: only the acknowledgement shows that another member has it.
      const fresh = await holder.acquire('fresh', { ttlMs: 120_000, renew: false })
      const old = await begin(set)
      try {
        await newPrimary(set, old)
        for (const lock of [renewed, long, several, fresh]) {
          assert.equal(lock.isHeld, true)
          for (const name of lock.names) {
            // The token of a lock that was just granted is written after the election.
            const token = await until(`${name} has a token`, async () => (await other.inspect(name))?.fencingToken)
            assert.equal(token, lock.fencingToken)
            assert.equal(await other.tryAcquire(name), null)
          }
        }
        assert.equal(await other.acquireLock('gist', 10), false)
        // A machine that stands still may cause one more election, or let the first call wait for the primary that is paused.
        const extend = () =>
          long.extend(150_000).then(
            () => true,
            (error) => assert.ok(error.retryable, error),
          )
        await until('the extension', extend, 2 * FAILOVER_TIMEOUT_MS)
        assert.ok((await inspectHeld(other, 'long')).remainingMs > 130_000)

        // Without a renewal at the new primary the lease would have expired.
        await until(
          'the first ttl has passed',
          () => performance.now() > renewedSince + ttlMs + 500,
          FAILOVER_TIMEOUT_MS,
        )
        assert.equal(renewed.isHeld, true)
        assert.equal(renewed.signal.aborted, false)
        assert.equal((await other.inspect('renewed'))?.fencingToken, renewed.fencingToken)
        assert.equal(other.stats().waiting, 3, 'no waiter was granted a held name')
      } finally {
        await end(old)
      }
      // The return of the old primary changes nothing.
      await set.ready()
      for (const name of names) assert.equal((await other.inspect(name))?.fencingToken, tokens[name])
      for (const lock of [renewed, long, several, fresh]) assert.equal(await lock.release(), true)
      assert.equal(await holder.releaseLock('gist'), true)
      for (const next of await Promise.all(waiters)) {
        assert.ok(next.fencingToken > (tokens[next.name] ?? assert.fail(`${next.name} had no token`)))
        assert.equal(await next.release(), true)
      }
      assert.deepEqual(
        events.filter(({ type }) => type === 'lost'),
        [],
      )
      assert.equal(holder.stats().lost, 0)
    })
  }

  test('calls during an election wait within their limits, and succeed when it ends in time', async ({
    set,
    connect,
    options,
  }) => {
    const limits = { long: 120_000, short: 1500 }
    const [long, short] = await Promise.all(Object.values(limits).map((storeTimeoutMs) => connect({ storeTimeoutMs })))
    const held = {}
    for (const [prefix, locks] of Object.entries({ long, short })) {
      held[prefix] = await locks.acquire([`${prefix}:held`], { ttlMs: 150_000 })
      held[`${prefix}:out`] = await locks.acquire([`${prefix}:out`], { ttlMs: 150_000 })
      assert.equal(await locks.acquireLock(`${prefix}:gist`, 150), true)
    }
    const calls = (prefix, locks) => ({
      acquire: () => locks.acquire(`${prefix}:a`, { waitMs: limits[prefix], ttlMs: 150_000 }),
      'acquire of two': () => locks.acquire([`${prefix}:b`, `${prefix}:c`], { ttlMs: 150_000, waitMs: limits[prefix] }),
      tryAcquire: () => locks.tryAcquire(`${prefix}:d`, { ttlMs: 150_000 }),
      using: () => locks.using(`${prefix}:e`, { ttlMs: 150_000, waitMs: limits[prefix] }, () => 'used'),
      acquireLock: () => locks.acquireLock(`${prefix}:f`, 150),
      acquireAndExecute: () => locks.acquireAndExecute(`${prefix}:g`, 150, () => 'done'),
      releaseLock: () => locks.releaseLock(`${prefix}:gist`),
      extend: () => held[prefix].extend(160_000),
      release: () => held[`${prefix}:out`].release(),
      inspect: () => locks.inspect(`${prefix}:held`),
      list: () => locks.list({ prefix: `${prefix}:` }),
      forceRelease: () => locks.forceRelease(`${prefix}:unknown`),
      async connect() {
        const locks = await LockService.connect(set.url, { ...options, storeTimeoutMs: limits[prefix] })
        await locks.close()
      },
    })
    const begin = (prefix, locks) =>
      Object.entries(calls(prefix, locks)).map(([what, call]) => {
        return { what, startedAt: performance.now(), answer: later(call()) }
      })

    const election = await withoutPrimary(set)
    const answered = []
    const waits = begin('long', long)
    waits.forEach(({ what, answer }) =>
      answer.then(
        () => answered.push(what),
        () => answered.push(what),
      ),
    )
    const isAborted = new AbortController()
    const aborted = rejection(long.acquire('aborted', { waitMs: 120_000, signal: isAborted.signal }))

    for (const { what, startedAt, answer } of begin('short', short)) {
      const error = await rejection(answer)
      assert.equal(error.code, 'LOCK_STORE', `${what}: ${error}`)
      assert.equal(error.retryable, true, `${what}: ${error.message}`)
      assert.equal(error.engine, 'mongodb')
      const tookMs = performance.now() - startedAt
      assert.ok(tookMs < limits.short + SLACK_MS, `${what} took ${tookMs} ms`)
    }
    // A call's own limit may be shorter than its service's limit.
    const startedAt = performance.now()
    await rejects(long.acquire('brief', { waitMs: 200 }), 'LOCK_STORE', { retryable: true })
    assert.ok(performance.now() - startedAt < 1000 + SLACK_MS)
    isAborted.abort('enough')
    assert.equal(await aborted, 'enough')
    assert.deepEqual(answered, [], 'no call was answered during the election')

    await election.end()
    const given = Object.fromEntries(await Promise.all(waits.map(async ({ what, answer }) => [what, await answer])))
    assert.equal(given.using, 'used')
    assert.equal(given.acquireAndExecute, 'done')
    for (const what of ['acquireLock', 'releaseLock', 'release']) assert.equal(given[what], true, what)
    assert.equal(given.inspect.fencingToken, held.long.fencingToken)
    assert.equal(given.forceRelease, false)
    for (const what of ['acquire', 'acquire of two', 'tryAcquire'])
      assert.equal(await given[what].release(), true, what)
    assert.equal(await long.releaseLock('long:f'), true)
    for (const lock of [held.long, held.short]) assert.equal(await lock.release(), true)
    // The same services continue, and the names of failed calls are free again.
    const names = [
      'brief',
      'aborted',
      ...['a', 'b', 'c', 'd', 'e', 'f', 'g', 'gist', 'out'].map((name) => `short:${name}`),
    ]
    for (const name of names) {
      const lock = await short.acquire(name, { waitMs: FAILOVER_TIMEOUT_MS })
      assert.equal(await lock.release(), true, name)
    }
  })

  test('a lock that was handed off right before the SIGKILL of the primary has one holder, and the next waiter gets it', async ({
    set,
    connect,
  }, t) => {
    const url = set.url + FAST_MONITORING
    const [holder, first, second] = await Promise.all([1, 2, 3].map(() => connect(LONG_TIMEOUT, url)))
    const options = { ttlMs: 60_000, waitMs: 150_000 }
    const held = await holder.acquire('n', options)
    const handedOff = first.acquire('n', options)
    await waiting(first, 1)
    const last = later(second.acquire('n', options))
    await waiting(second, 1)
    const old = await until('a primary', set.primary)
    const released = later(held.release())
    const lock = await handedOff
    // The renewal that extends the lease begins 10 ms after the hand-off.
    const { remainingMs } = lock
    await old.kill()
    let isHeldByNext = false
    const next = last.then((next) => {
      isHeldByNext = true
      assert.equal(lock.isHeld, false, 'two holders')
      return next
    })
    try {
      // A message that is late by more than 250 ms is confirmed by an attempt, which is granted the whole ttl.
      if (remainingMs > 2000) t.diagnostic('the hand-off was late: the lease had the whole ttl before the SIGKILL')
      assert.equal(await released, true)
      await newPrimary(set, old)
      await until('the end of the lease of the hand-off', () => !lock.isHeld || lock.remainingMs > 2000)
      t.diagnostic(
        lock.isHeld ? 'the lease was extended before the SIGKILL' : `the lease is lost: ${lock.signal.reason}`,
      )
      if (lock.isHeld) {
        assert.equal(isHeldByNext, false)
        assert.equal(await lock.release(), true)
      }
      assert.ok((await next).fencingToken > lock.fencingToken)
      assert.equal(await (await next).release(), true)
    } finally {
      await old.restart()
    }
  })

  test('a waiter that starts during an election is served after it', async ({ set, connectAll }) => {
    const [holder, ...others] = await connectAll(3, { storeTimeoutMs: 120_000 })
    const held = await holder.acquire('n', { ttlMs: 150_000 })
    const election = await withoutPrimary(set)
    const served = []
    const waits = others.flatMap((service) =>
      [1, 2].map(() => later(service.using('n', { waitMs: 150_000 }, (lock) => void served.push(lock.fencingToken)))),
    )
    await sleep(500)
    const released = holder.acquire('other', { waitMs: 120_000 }).then((lock) => lock.release())
    await election.end()
    await Promise.all(others.map((service) => waiting(service, 2)))
    assert.equal(await released, true)
    assert.deepEqual(served, [])
    assert.equal(await held.release(), true)
    await Promise.all(waits)
    assertGrowing([held.fencingToken, ...served])
    assert.equal(served.length, 4)
  })
})

replicaSetSuite('fencing tokens', {}, (test) => {
  test('fencing tokens grow after release, expiry and failover, although the wall clock goes back', async ({
    set,
    connectAll,
    document,
  }) => {
    const services = await connectAll(2, LONG_TIMEOUT)
    const tokens = []
    const acquire = async (round, options) => {
      const lock = await services[round % 2].acquire('n', { waitMs: FAILOVER_TIMEOUT_MS, ...options })
      tokens.push(lock.fencingToken)
      return lock
    }
    const isGone = async () => (await document('n', await until('a primary', set.primary))) === null
    // By how much the last token is ahead of this machine's clock.
    const aheadSeconds = () => Number(tokens.at(-1) / 1_000_000n) - Date.now() / 1000

    for (let round = 0; round < 6; round++) {
      assert.equal(await (await acquire(round)).release(), true)
      assert.ok(await isGone(), 'a release leaves no document')
      await acquire(round + 1, { ttlMs: 200, renew: false })
      await until('the TTL monitor has run', isGone)
      if (round === 3) {
        // The same as if the wall clock of every later primary were an hour behind.
        await advanceClusterTime(await until('a primary', set.primary), 3600)
        assert.equal(await (await acquire(round)).release(), true)
        assert.ok(aheadSeconds() > 3500, 'the token comes from the logical clock')
      }
      if (round % 2 === 1) await newPrimary(set, await set.stepDown({ seconds: 20, force: round === 3 }))
    }
    assert.ok(aheadSeconds() > 3500, 'the next primary continues from there')
    assertGrowing(tokens)
  })
})
