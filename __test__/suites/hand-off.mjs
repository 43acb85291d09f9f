// The hand-off is the grant: the waiter's function starts when the message arrives, and the lease is extended afterwards.
import assert from 'node:assert/strict'
import { hostname } from 'node:os'
import { proxySuite } from '../proxy.mjs'
import { rejects, sleep, until, waiting } from '../tools.mjs'

/** A hand-off lasts as long as the last heartbeat of its process counts, at most, less the allowance for clocks. */
const SHORT_MS = 4500

/** How a call may fail whose hand-off was not confirmed in time. */
const LATE = /^LOCK_(STORE|LOST)$/

/**
 * Waits for 'n' through the proxy, and returns what happens to the call.
 *
 * @param {import('../../index.js').LockService} locks
 * @param {import('../../index.js').AcquireOptions} [options]
 */
function waitFor(locks, options) {
  const state = {
    lock: /** @type {import('../../index.js').Lock | undefined} */ (undefined),
    remainingMs: 0,
    end: () => {},
  }
  const ended = new Promise((resolve) => (state.end = () => resolve(undefined)))
  const call = locks.using('n', { waitMs: 60_000, ...options }, async (lock) => {
    state.lock = lock
    state.remainingMs = lock.remainingMs
    await ended
  })
  return { state, call }
}

/**
 * The cases for every server store that sends a message with each hand-off. On MySQL, waiters poll.
 *
 * `confirmsLate`: a message that arrives late is confirmed. Where the order of entries is the lock, it is as good as an early one.
 * `readsToken`: the waiter reads the fencing token after the message.
 *
 * @param {'redis' | 'mongodb-replica-set' | 'postgres' | 'etcd' | 'zookeeper'} kind
 */
export function handOff(kind, { confirmsLate = true, readsToken = false } = {}) {
  proxySuite(kind, 'the hand-off is the grant', {}, (test) => {
    /** @type {typeof test} */
    const testWithoutRequests = readsToken ? () => {} : test
    testWithoutRequests(
      'no round trip of the waiter is between the release and its function',
      async ({ direct, warm, proxy }) => {
        const locks = await warm()
        for (let turn = 0, inTime = 0; inTime < 3; turn++) {
          assert.ok(turn < 10, 'every message was late')
          const held = await direct.acquire('n')
          const { state, call } = waitFor(locks)
          await waiting(locks, 1)
          // No request of the waiter reaches the server, so it gets no reply to one.
          proxy.holds.toServer = true
          await held.release()
          const isInTime = await until('the function of the waiter', () => state.lock, SHORT_MS).catch(() => false)
          if (!isInTime) {
            // The machine stood still for more than 250 ms: the waiter confirms a late message.
            let failure
            call.catch((error) => (failure = error))
            proxy.resume()
            await until('the confirmation', () => state.lock || failure)
            state.end()
            if (failure) assert.match(failure.code, LATE, failure)
            else await call
            continue
          }
          inTime++
          const { lock, remainingMs } = state
          assert.ok(lock)
          assert.ok(lock.fencingToken > held.fencingToken)
          assert.ok(remainingMs > 0 && remainingMs <= SHORT_MS, `${remainingMs} ms`)
          proxy.resume()
          await until('the whole ttl', () => lock.remainingMs > 2 * SHORT_MS)
          state.end()
          await call
        }
      },
    )

    testWithoutRequests(
      'a job that ended before its lease is no loss, although its release is executed after that',
      async (fixture) => {
        const { direct, warm, proxy } = fixture
        const locks = await warm()
        for (let turn = 0, isDone = false; !isDone; turn++) {
          assert.ok(turn < 10, 'every message was late')
          const held = await direct.acquire('n')
          const { state, call } = waitFor(locks, { ttlMs: 1500 })
          await waiting(locks, 1)
          proxy.holds.toServer = true
          await held.release()
          await until('the function of the waiter', () => state.lock, 1000).catch(() => {})
          isDone = state.lock?.isHeld === true
          state.end()
          if (isDone) await sleep(1700)
          proxy.resume()
          if (isDone) await call
          else await call.catch((error) => assert.match(error.code, LATE, error))
        }
        assert.equal(locks.stats().held, 0)
      },
    )

    test(`a late message is ${confirmsLate ? 'confirmed by an attempt' : 'a grant'}`, async ({
      direct,
      warm,
      proxy,
    }) => {
      const locks = await warm()
      const held = await direct.acquire('n')
      const { state, call } = waitFor(locks)
      await waiting(locks, 1)
      proxy.holdReplies()
      await held.release()
      await sleep(400)
      assert.equal(state.lock, undefined)
      proxy.resume()
      await until('the function of the waiter', () => state.lock)
      // An attempt is granted the whole ttl at once.
      assert.equal(state.remainingMs > 2 * SHORT_MS, confirmsLate, `${state.remainingMs} ms`)
      await until('the whole ttl', () => (state.lock?.remainingMs ?? 0) > 2 * SHORT_MS)
      state.end()
      await call
    })

    test('a message that is never delivered costs a waiter nothing but time', async ({ direct, warm, proxy }) => {
      const locks = await warm()
      const held = await direct.acquire('n')
      const { state, call } = waitFor(locks)
      await waiting(locks, 1)
      proxy.blackhole()
      await held.release()
      await sleep(50)
      proxy.cut()
      await until('the function of the waiter', () => state.lock)
      state.end()
      await call
    })

    test('the new holder is shown at once, and counted once', async ({ direct, connect, server }) => {
      /** @type {string[]} */
      const events = []
      const locks = await connect({ onEvent: ({ type }) => events.push(type) }, server.port)
      for (const options of [{}, { renew: false, ttlMs: 20_000 }, { ttlMs: 12_000 }]) {
        events.length = 0
        const before = locks.stats()
        const held = await direct.acquire('n')
        const { state, call } = waitFor(locks, options)
        await waiting(locks, 1)
        await held.release()
        const info = await direct.inspect('n')
        const lock = await until('the function of the waiter', () => state.lock)
        assert.equal(info?.fencingToken, lock.fencingToken)
        assert.equal(info?.holder?.pid, process.pid)
        assert.equal(info?.holder?.host, hostname())
        assert.ok(Math.abs(Date.now() - Number(info?.holder?.since)) < 60_000)
        await sleep(100)
        state.end()
        await call
        const after = locks.stats()
        assert.deepEqual(events, ['waiting', 'acquired', 'released'], JSON.stringify(options))
        assert.equal(after.acquired, before.acquired + 1)
        assert.equal(after.renewed, before.renewed)
        assert.equal(after.storeErrors, 0)
      }
    })

    test('a call that times out with its grant under way leaves nothing behind', async ({ direct, warm, proxy }) => {
      const locks = await warm()
      const { acquired } = locks.stats()
      const held = await direct.acquire('n')
      const call = locks.acquire('n', { waitMs: 3000, ttlMs: 60_000 })
      const outcome = rejects(call, 'LOCK_TIMEOUT')
      await waiting(locks, 1)
      proxy.holdReplies()
      await held.release()
      assert.equal((await direct.inspect('n'))?.holder?.pid, process.pid)
      await outcome
      proxy.resume()
      await until('the name is free', async () => (await direct.inspect('n')) === null)
      assert.equal(locks.stats().acquired, acquired)
    })
  })
}
