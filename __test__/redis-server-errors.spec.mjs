// Errors and failures of a Redis server: a clear error with the right `retryable`, recovery without a restart of this process,
// and waiters that are served in the end.
import assert from 'node:assert/strict'
import { SLACK_MS, proxySuite } from './proxy.mjs'
import { openRedis } from './redis-client.mjs'
import { prepared, rejects, sleep, SOON_MS, unlessStalled, until, waiting } from './tools.mjs'

const STORE_TIMEOUT_MS = 1500

/**
 * The faults. `begin` causes one, and resolves to a function that ends it.
 * - `redis` is another client; `openClient` opens one more.
 * - `message`: the error of a call.
 * - `losesData`: the store restarts with older data or none.
 * - `recovers`: calls succeed again after the first error.
 */
const FAULTS = {
  'READONLY, as after a failover': {
    async begin({ redis }) {
      await redis.replicaof('127.0.0.1', 1)
      return () => redis.replicaof('NO', 'ONE')
    },
    message: /READONLY/,
  },
  OOM: {
    async begin({ redis }) {
      await redis.config('SET', 'maxmemory', 1)
      return () => redis.config('SET', 'maxmemory', 0)
    },
    message: /OOM/,
  },
  'BUSY with another client’s script': {
    async begin({ redis, openClient }) {
      await redis.config('SET', 'busy-reply-threshold', 50)
      openClient()
        .eval('while true do end', 0)
        .catch(() => {})
      await refused(redis, /BUSY/)
      return () => redis.script('KILL')
    },
    message: /BUSY/,
  },
  LOADING: {
    async begin({ redis, server }) {
      await redis.eval("for i = 1, 12000 do redis.call('SET', 'filler:' .. i, i) end", 0)
      await redis.save()
      const restarted = server.restart()
      await refused(redis, /LOADING/)
      return () => restarted
    },
    message: /LOADING/,
  },
  'maxclients reached': {
    async begin({ redis }) {
      await redis.config('SET', 'maxclients', 1)
      for (const type of ['normal', 'pubsub']) await redis.client('KILL', 'TYPE', type, 'SKIPME', 'yes')
      return () => redis.config('SET', 'maxclients', 1000)
    },
    // The server sends the error and closes the connection: data that arrives then causes a reset, which may hide the error.
    message: /max number of clients|reset by peer/,
  },
  'a stopped server': {
    async begin({ server }) {
      await server.pause()
      return () => server.resume()
    },
    message: /no answer|timed out/,
  },
  'a killed server that restarts empty': {
    async begin({ server }) {
      await server.kill()
      return () => server.restart()
    },
    message: /no connection to|broken|closed|reset/i,
    losesData: true,
  },
  'half-open connections': {
    async begin({ proxy }) {
      proxy.blackhole()
      return () => {}
    },
    message: /no answer|timed out/,
    recovers: true,
  },
}

const refused = (redis, how) =>
  until('the fault is active', () =>
    redis.ping().then(
      () => false,
      (error) => how.test(error.message),
    ),
  )

/** Makes the server load slowly (12 000 keys in 5 s), and reply while it loads. */
const args = ['--key-load-delay', '400', '--loading-process-events-interval-bytes', '1024']

proxySuite('redis', 'server errors', { serverPerTest: true, args }, (test) => {
  /** Adds to the fixture what the faults need. */
  function open(fixture, t) {
    const openClient = () => {
      const redis = openRedis(fixture.server.url, {
        maxRetriesPerRequest: 0,
        retryStrategy: () => 50,
        enableReadyCheck: false,
      })
      t.after(() => redis.disconnect())
      return redis
    }
    return { ...fixture, openClient, redis: openClient() }
  }

  /** Starts four waiters for `n`, one after the other. Resolves to `{ done }`, a promise of their end, once all are waiting. */
  async function startWaiters(locks, served) {
    const calls = []
    for (const index of [0, 1, 2, 3]) {
      calls.push(locks.using('n', { waitMs: 60_000 }, () => served.push(index)))
      await waiting(locks, index + 1)
    }
    return { done: Promise.all(calls) }
  }

  const queueKey = (fixture) => `holdfast:queue:{${fixture.key('n')}}`

  for (const [what, fault] of Object.entries(FAULTS)) {
    test(`${what}: calls reject with a clear error, and succeed again afterwards`, async (fixture, t) => {
      const context = open(fixture, t)
      const locks = await fixture.warm({ storeTimeoutMs: STORE_TIMEOUT_MS })
      const held = await prepared(() => locks.acquire('held', { ttlMs: 60_000 }))
      const end = await fault.begin(context)
      const startedAt = performance.now()
      const error = await rejects(locks.acquire('a', { waitMs: 60_000 }), 'LOCK_STORE', { engine: 'redis', key: 'a' })
      assert.ok(performance.now() - startedAt < STORE_TIMEOUT_MS + SLACK_MS)
      assert.match(`${error.message} ${error.cause.message}`, fault.message)
      assert.equal(error.retryable, true)
      if (!fault.recovers)
        await rejects(locks.tryAcquire('b'), 'LOCK_STORE', { engine: 'redis', key: 'b', retryable: true })
      await end()
      await until('the server is back', () =>
        locks.inspect('any').then(
          () => true,
          () => false,
        ),
      )
      for (const name of ['a', 'b', 'c'])
        assert.equal(await unlessStalled(async () => (await locks.acquire(name)).release()), true)
      const extended = unlessStalled(() => held.extend(90_000))
      if (fault.losesData) await rejects(extended, 'LOCK_LOST')
      else await extended
      assert.equal(await held.release(), !fault.losesData)
    })

    test(`${what}: waiters are served in order`, async (fixture, t) => {
      const context = open(fixture, t)
      const locks = await fixture.connect({ storeTimeoutMs: fault.recovers ? 2000 : 20_000 })
      const held = await fixture.direct.acquire('n', { ttlMs: 60_000 })
      const served = []
      const { done } = await startWaiters(locks, served)
      const end = await fault.begin(context)
      // The hand-off happens during the fault.
      const released = held.release().catch(() => {})
      await sleep(1000)
      await end()
      const endedAt = performance.now()
      await released
      await done
      // At most two heartbeats later, or one and the time after which a silent connection is closed.
      assert.ok(performance.now() - endedAt < 4000 + SOON_MS)
      // The waiters enter a lost queue again. Their order is not checked then.
      if (fault.losesData) served.sort()
      assert.deepEqual(served, [0, 1, 2, 3])
      await until('nothing is left', async () => (await context.redis.exists(queueKey(fixture))) === 0)
    })
  }

  test('a fault that lasts longer than storeTimeoutMs rejects waiting calls with LOCK_STORE', async (fixture, t) => {
    const context = open(fixture, t)
    const locks = await fixture.connect({ storeTimeoutMs: STORE_TIMEOUT_MS })
    const held = await fixture.direct.acquire('n', { ttlMs: 60_000 })
    const waits = [0, 1, 2].map(() =>
      rejects(locks.acquire('n', { waitMs: Infinity }), 'LOCK_STORE', { retryable: true, key: 'n' }),
    )
    await waiting(locks, 3)
    await context.server.pause()
    const startedAt = performance.now()
    await Promise.all(waits)
    // The heartbeat interval, its timeout, and the waiter's own attempt.
    assert.ok(performance.now() - startedAt < 2000 + 2 * STORE_TIMEOUT_MS + SLACK_MS)
    context.server.resume()
    // Their positions are removed in the background: no name is handed to a waiter that has rejected.
    await until(
      'their positions are removed',
      async () => (await context.redis.zcount(queueKey(fixture), 0, '+inf').catch(() => 1)) === 0,
    )
    assert.equal(await held.release(), true)
  })

  test('positions that a long outage left behind do not block other waiters', async (fixture, t) => {
    const { redis } = open(fixture, t)
    const locks = await fixture.connect({ storeTimeoutMs: STORE_TIMEOUT_MS })
    const held = await fixture.direct.acquire('n', { ttlMs: 60_000 })
    const waits = [0, 1, 2].map(() => rejects(locks.acquire('n', { waitMs: Infinity, ttlMs: 1000 }), 'LOCK_STORE'))
    await waiting(locks, 3)
    await fixture.proxy.down()
    await Promise.all(waits)
    // The clean-up is retried for the length of the ttl.
    await sleep(3000)
    assert.equal(await redis.zcount(queueKey(fixture), 0, '+inf'), 3)
    await fixture.proxy.up()
    const served = []
    const { done } = await startWaiters(locks, served)
    const releasedAt = performance.now()
    assert.equal(await held.release(), true)
    await done
    // The process is alive again, and removes the positions that it does not know.
    assert.ok(performance.now() - releasedAt < SOON_MS)
    assert.deepEqual(served, [0, 1, 2, 3])
    await until('nothing is left', async () => (await redis.exists(queueKey(fixture))) === 0)
  })

  test('SCRIPT FLUSH does not disturb waiters', async (fixture, t) => {
    const { redis } = open(fixture, t)
    const locks = await fixture.connect()
    for (let round = 0; round < 5; round++) {
      const held = await fixture.direct.acquire('n')
      const done = Promise.all([0, 1, 2].map(() => locks.using('n', () => redis.script('FLUSH'))))
      await waiting(locks, 3)
      await redis.script('FLUSH')
      assert.equal(await held.release(), true)
      await done
    }
    assert.equal(locks.stats().storeErrors, 0)
    assert.equal(fixture.direct.stats().storeErrors, 0)
  })

  test('waiters are served at once and in order after their connection breaks', async (fixture, t) => {
    const { redis } = open(fixture, t)
    const locks = await fixture.connect()
    for (let round = 0; round < 5; round++) {
      const held = await fixture.direct.acquire('n', { ttlMs: 60_000 })
      const served = []
      const { done } = await startWaiters(locks, served)
      const cutAt = performance.now()
      await redis.client('KILL', 'TYPE', 'pubsub')
      if (round % 2) await sleep(20 * round)
      assert.equal(await held.release(), true)
      await done
      assert.ok(performance.now() - cutAt < 4000 + SOON_MS)
      assert.deepEqual(served, [0, 1, 2, 3])
    }
  })
})
