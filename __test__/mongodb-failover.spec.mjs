// What a fail-over of a MongoDB replica set means to who holds a lock, who waits for one, and who calls meanwhile.
import assert from 'node:assert/strict'
import { LockService } from '../index.js'
import { PATIENCE_MS, SLACK_MS, TROUBLES, WATCHFUL, advanceClusterTime, replicaSetSuite, successor, withoutPrimary } from './replica-set.mjs'
import { assertGrowing, rejection, rejects, sleep, until, waiting } from './tools.mjs'

/** Promises whose end matters only if the test gets that far: what went wrong before is what it has to show. */
function later(promises) {
  promises.forEach((promise) => promise.catch(() => {}))
  return promises
}

/** Calls wait for a new primary for as long as it takes. */
const PATIENT = { storeTimeoutMs: PATIENCE_MS }

replicaSetSuite('leases across a fail-over', {}, (test) => {
  for (const [what, { begin, end, ttlMs }] of Object.entries(TROUBLES)) {
    test(`what was granted before ${what} is held after it`, async ({ set, connect }) => {
      const events = []
      const url = set.url + WATCHFUL
      const holder = await connect({ ...PATIENT, onEvent: (event) => events.push(event) }, url)
      const other = await connect(PATIENT, url)
      const renewed = await holder.acquire('renewed', { ttlMs })
      const renewedSince = performance.now()
      const long = await holder.acquire('long', { ttlMs: 120_000, renew: false })
      const several = await holder.acquire(['one', 'two'], { ttlMs: 120_000, renew: false })
      assert.equal(await holder.acquireLock('gist', 120), true)
      const names = ['gist', 'long', 'one', 'renewed', 'two']
      const tokens = Object.fromEntries((await other.list()).map(({ name, fencingToken }) => [name, fencingToken]))
      assert.deepEqual(Object.keys(tokens).sort(), names)
      const waiters = later(['long', 'renewed', 'two'].map((name) => other.acquire(name, { waitMs: 150_000 })))
      await waiting(other, 3)

      // Just granted: nothing but the acknowledgement says that another member has it.
      const fresh = await holder.acquire('fresh', { ttlMs: 120_000, renew: false })
      const old = await begin(set)
      try {
        await successor(set, old)
        for (const lock of [renewed, long, several, fresh]) {
          assert.equal(lock.isHeld, true)
          for (const name of lock.names) {
            assert.equal((await other.inspect(name)).fencingToken, lock.fencingToken)
            assert.equal(await other.tryAcquire(name), null)
          }
        }
        assert.equal(await other.acquireLock('gist', 10), false)
        await long.extend(150_000)
        assert.ok((await other.inspect('long')).remainingMs > 130_000)

        // Without a renewal at the new primary it would be over by now.
        await until('its first ttl is over', () => performance.now() > renewedSince + ttlMs + 500, PATIENCE_MS)
        assert.equal(renewed.isHeld, true)
        assert.equal(renewed.signal.aborted, false)
        assert.equal((await other.inspect('renewed')).fencingToken, renewed.fencingToken)
        assert.equal(other.stats().waiting, 3, 'nothing was given away')
      } finally {
        await end(old)
      }
      // Nor does a member that comes back change any of it.
      await set.whole()
      for (const name of names) assert.equal((await other.inspect(name)).fencingToken, tokens[name])
      for (const lock of [renewed, long, several, fresh]) assert.equal(await lock.release(), true)
      assert.equal(await holder.releaseLock('gist'), true)
      for (const next of await Promise.all(waiters)) {
        assert.ok(next.fencingToken > tokens[next.name])
        assert.equal(await next.release(), true)
      }
      assert.deepEqual(events.filter(({ type }) => type === 'lost'), [])
      assert.equal(holder.stats().lost, 0)
    })
  }

  test('calls during an election wait within their limits, and then go through', async ({ set, connect, options }) => {
    const limits = { patient: 120_000, hasty: 1500 }
    const [patient, hasty] = await Promise.all(Object.values(limits).map((storeTimeoutMs) => connect({ storeTimeoutMs })))
    const held = {}
    for (const [who, locks] of Object.entries({ patient, hasty })) {
      held[who] = await locks.acquire([`${who}:held`], { ttlMs: 150_000 })
      held[`${who}:out`] = await locks.acquire([`${who}:out`], { ttlMs: 150_000 })
      assert.equal(await locks.acquireLock(`${who}:gist`, 150), true)
    }
    const calls = (who, locks) => ({
      acquire: () => locks.acquire(`${who}:a`, { waitMs: limits[who], ttlMs: 150_000 }),
      'acquire of two': () => locks.acquire([`${who}:b`, `${who}:c`], { ttlMs: 150_000, waitMs: limits[who] }),
      tryAcquire: () => locks.tryAcquire(`${who}:d`, { ttlMs: 150_000 }),
      using: () => locks.using(`${who}:e`, { ttlMs: 150_000, waitMs: limits[who] }, () => 'used'),
      acquireLock: () => locks.acquireLock(`${who}:f`, 150),
      acquireAndExecute: () => locks.acquireAndExecute(`${who}:g`, 150, () => 'done'),
      releaseLock: () => locks.releaseLock(`${who}:gist`),
      extend: () => held[who].extend(160_000),
      release: () => held[`${who}:out`].release(),
      inspect: () => locks.inspect(`${who}:held`),
      list: () => locks.list({ prefix: `${who}:` }),
      forceRelease: () => locks.forceRelease(`${who}:nobody`),
      async connect() {
        const locks = await LockService.connect(set.url, { ...options, storeTimeoutMs: limits[who] })
        await locks.close()
      },
    })
    const begin = (who, locks) =>
      Object.entries(calls(who, locks)).map(([what, call]) => {
        const answer = call()
        later([answer])
        return { what, startedAt: performance.now(), answer }
      })

    const election = await withoutPrimary(set)
    const answered = []
    const waits = begin('patient', patient)
    waits.forEach(({ what, answer }) => answer.then(() => answered.push(what), () => answered.push(what)))
    const isAborted = new AbortController()
    const aborted = rejection(patient.acquire('aborted', { waitMs: 120_000, signal: isAborted.signal }))

    for (const { what, startedAt, answer } of begin('hasty', hasty)) {
      const error = await rejection(answer)
      assert.equal(error.code, 'LOCK_STORE', `${what}: ${error}`)
      assert.equal(error.retryable, true, `${what}: ${error.message}`)
      assert.equal(error.engine, 'mongodb')
      const tookMs = performance.now() - startedAt
      assert.ok(tookMs < limits.hasty + SLACK_MS, `${what} took ${tookMs} ms`)
    }
    // The limit of a call may be shorter than that of its service.
    const startedAt = performance.now()
    await rejects(patient.acquire('short', { waitMs: 200 }), 'LOCK_STORE', { retryable: true })
    assert.ok(performance.now() - startedAt < 1000 + SLACK_MS)
    isAborted.abort('enough')
    assert.equal(await aborted, 'enough')
    assert.deepEqual(answered, [], 'nobody can have answered these')

    await election.end()
    const given = Object.fromEntries(await Promise.all(waits.map(async ({ what, answer }) => [what, await answer])))
    assert.equal(given.using, 'used')
    assert.equal(given.acquireAndExecute, 'done')
    for (const what of ['acquireLock', 'releaseLock', 'release']) assert.equal(given[what], true, what)
    assert.equal(given.inspect.fencingToken, held.patient.fencingToken)
    assert.equal(given.forceRelease, false)
    for (const what of ['acquire', 'acquire of two', 'tryAcquire']) assert.equal(await given[what].release(), true, what)
    assert.equal(await patient.releaseLock('patient:f'), true)
    for (const lock of [held.patient, held.hasty]) assert.equal(await lock.release(), true)
    // The same services go on, and what was given up is free again.
    const names = ['short', 'aborted', ...['a', 'b', 'c', 'd', 'e', 'f', 'g', 'gist', 'out'].map((name) => `hasty:${name}`)]
    for (const name of names) {
      const lock = await hasty.acquire(name, { waitMs: PATIENCE_MS })
      assert.equal(await lock.release(), true, name)
    }
  })

  test('who began to wait during an election is served after it', async ({ set, connectAll }) => {
    const [holder, ...others] = await connectAll(3, { storeTimeoutMs: 120_000 })
    const held = await holder.acquire('n', { ttlMs: 150_000 })
    const election = await withoutPrimary(set)
    const served = []
    const waits = later(others.flatMap((service) =>
      [1, 2].map(() => service.using('n', { waitMs: 150_000 }, (lock) => void served.push(lock.fencingToken))),
    ))
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
  test('they grow although nothing is left of the last holder, whatever the wall clock says', async ({ set, connectAll, document }) => {
    const services = await connectAll(2, PATIENT)
    const tokens = []
    const take = async (turn, options) => {
      const lock = await services[turn % 2].acquire('n', { waitMs: PATIENCE_MS, ...options })
      tokens.push(lock.fencingToken)
      return lock
    }
    const isGone = async () => (await document('n', await until('a primary', set.primary))) === null
    // How far the last token is ahead of this machine's clock.
    const aheadSeconds = () => Number(tokens.at(-1) / 1_000_000n) - Date.now() / 1000

    for (let turn = 0; turn < 6; turn++) {
      assert.equal(await (await take(turn)).release(), true)
      assert.ok(await isGone(), 'a release leaves nothing')
      await take(turn + 1, { ttlMs: 200, renew: false })
      await until('the TTL monitor has been there', isGone)
      if (turn === 3) {
        // As if the wall clock of every primary from now on were an hour behind that of this one.
        await advanceClusterTime(await until('a primary', set.primary), 3600)
        assert.equal(await (await take(turn)).release(), true)
        assert.ok(aheadSeconds() > 3500, 'the token comes from the logical clock')
      }
      if (turn % 2 === 1) await successor(set, await set.stepDown({ seconds: 20, force: turn === 3 }))
    }
    assert.ok(aheadSeconds() > 3500, 'the next primary goes on from there')
    assertGrowing(tokens)
  })
})
