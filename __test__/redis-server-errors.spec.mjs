// A Redis in each kind of trouble: a clear error that says whether trying again helps, service again without a restart of
// this process, and waiters that are served in the end.
import assert from 'node:assert/strict'
import Redis from 'ioredis'
import { SLACK_MS, proxySuite } from './proxy.mjs'
import { rejects, sleep, SOON_MS, until, waiting } from './tools.mjs'

const STORE_TIMEOUT_MS = 800

/**
 * How each trouble begins, as a function that resolves when it has to one that ends it; and what the error says.
 * - `redis` is another tool's connection, `more` opens one more.
 * - `forgets`: the store comes back with older data, or none.
 * - `mends`: the client gets over it by itself, after the first error.
 */
const TROUBLES = {
  'READONLY, as after a fail-over': {
    async begin({ redis }) {
      await redis.replicaof('127.0.0.1', 1)
      return () => redis.replicaof('NO', 'ONE')
    },
    says: /READONLY/,
  },
  OOM: {
    async begin({ redis }) {
      await redis.config('SET', 'maxmemory', 1)
      return () => redis.config('SET', 'maxmemory', 0)
    },
    says: /OOM/,
  },
  'BUSY with somebody’s script': {
    async begin({ redis, more }) {
      await redis.config('SET', 'busy-reply-threshold', 50)
      more().eval('while true do end', 0).catch(() => {})
      await refused(redis, /BUSY/)
      return () => redis.script('KILL')
    },
    says: /BUSY/,
  },
  LOADING: {
    async begin({ redis, server }) {
      await redis.eval("for i = 1, 5000 do redis.call('SET', 'filler:' .. i, i) end", 0)
      await redis.save()
      const restarted = server.restart()
      await refused(redis, /LOADING/)
      return () => restarted
    },
    says: /LOADING/,
  },
  'no place for another client': {
    async begin({ redis }) {
      await redis.config('SET', 'maxclients', 1)
      for (const type of ['normal', 'pubsub']) await redis.client('KILL', 'TYPE', type, 'SKIPME', 'yes')
      return () => redis.config('SET', 'maxclients', 1000)
    },
    // The server says so and hangs up at once: when what we send meets that, the reset overtakes its words.
    says: /max number of clients|reset by peer/,
  },
  'a hung server': {
    async begin({ server }) {
      await server.pause()
      return () => server.resume()
    },
    says: /no answer|timed out/,
  },
  'a server that is gone, and comes back empty': {
    async begin({ server }) {
      await server.kill()
      return () => server.restart()
    },
    says: /no connection to|broken|closed|reset/i,
    forgets: true,
  },
  'half-open connections': {
    async begin({ proxy }) {
      proxy.strand()
      return () => {}
    },
    says: /no answer|timed out/,
    mends: true,
  },
}

const refused = (redis, how) => until('the trouble is there', () => redis.ping().then(() => false, (error) => how.test(error.message)))

/** Loads slowly, and answers meanwhile. */
const args = ['--key-load-delay', '400', '--loading-process-events-interval-bytes', '1024']

proxySuite('redis', 'trouble', { serverPerTest: true, args }, (test) => {
  /** The scene with what a trouble needs. */
  function open(fixture, t) {
    const more = () => {
      const redis = new Redis(fixture.server.url, { maxRetriesPerRequest: 0, retryStrategy: () => 50, enableReadyCheck: false })
      redis.on('error', () => {})
      t.after(() => redis.disconnect())
      return redis
    }
    return { ...fixture, more, redis: more() }
  }

  /** Four who wait for `n`, one after the other. Resolves once they do, to `{ turns }`. */
  async function line(locks, served) {
    const turns = []
    for (const index of [0, 1, 2, 3]) {
      turns.push(locks.using('n', { waitMs: 60_000 }, () => served.push(index)))
      await waiting(locks, index + 1)
    }
    return { turns: Promise.all(turns) }
  }

  const queue = (fixture) => `holdfast:queue:{${fixture.key('n')}}`

  for (const [what, trouble] of Object.entries(TROUBLES)) {
    test(`${what}: a clear error, and service again`, async (fixture, t) => {
      const store = open(fixture, t)
      const locks = await fixture.warm({ storeTimeoutMs: STORE_TIMEOUT_MS })
      const held = await locks.acquire('held', { ttlMs: 60_000 })
      const end = await trouble.begin(store)
      const startedAt = performance.now()
      const error = await rejects(locks.acquire('a', { waitMs: 60_000 }), 'LOCK_STORE', { engine: 'redis', key: 'a' })
      assert.ok(performance.now() - startedAt < STORE_TIMEOUT_MS + SLACK_MS)
      assert.match(`${error.message} ${error.cause.message}`, trouble.says)
      assert.equal(error.retryable, true)
      if (!trouble.mends) await rejects(locks.tryAcquire('b'), 'LOCK_STORE', { engine: 'redis', key: 'b', retryable: true })
      await end()
      await until('it is back', () => locks.inspect('any').then(() => true, () => false))
      for (const name of ['a', 'b', 'c']) assert.equal(await (await locks.acquire(name)).release(), true)
      if (trouble.forgets) await rejects(held.extend(90_000), 'LOCK_LOST')
      else await held.extend(90_000)
      assert.equal(await held.release(), !trouble.forgets)
    })

    test(`${what}: who waits meanwhile is served, in order`, async (fixture, t) => {
      const store = open(fixture, t)
      const locks = await fixture.connect({ storeTimeoutMs: trouble.mends ? 2000 : 20_000 })
      const held = await fixture.direct.acquire('n', { ttlMs: 60_000 })
      const served = []
      const { turns } = await line(locks, served)
      const end = await trouble.begin(store)
      // The hand-off falls into it.
      const released = held.release().catch(() => {})
      await sleep(1000)
      await end()
      const endedAt = performance.now()
      await released
      await turns
      // At most two signs of life later, or one and the time after which a silent connection is given up.
      assert.ok(performance.now() - endedAt < 4000 + SOON_MS)
      // A queue that is lost is made again by who comes first.
      if (trouble.forgets) served.sort()
      assert.deepEqual(served, [0, 1, 2, 3])
      await until('nothing is left', async () => (await store.redis.exists(queue(fixture))) === 0)
    })
  }

  test('trouble that outlasts a waiter’s patience ends its wait with LOCK_STORE', async (fixture, t) => {
    const store = open(fixture, t)
    const locks = await fixture.connect({ storeTimeoutMs: STORE_TIMEOUT_MS })
    const held = await fixture.direct.acquire('n', { ttlMs: 60_000 })
    const waits = [0, 1, 2].map(() => rejects(locks.acquire('n', { waitMs: Infinity }), 'LOCK_STORE', { retryable: true, key: 'n' }))
    await waiting(locks, 3)
    await store.server.pause()
    const startedAt = performance.now()
    await Promise.all(waits)
    // A sign of life, the silence after it, and the waiter's own try.
    assert.ok(performance.now() - startedAt < 2000 + 2 * STORE_TIMEOUT_MS + SLACK_MS)
    store.server.resume()
    // Their places are given back behind their backs: nobody is handed a name that nobody waits for.
    await until('their places are gone', async () => (await store.redis.zcount(queue(fixture), 0, '+inf').catch(() => 1)) === 0)
    assert.equal(await held.release(), true)
  })

  test('places that a long outage left behind hold nobody up', async (fixture, t) => {
    const { redis } = open(fixture, t)
    const locks = await fixture.connect({ storeTimeoutMs: STORE_TIMEOUT_MS })
    const held = await fixture.direct.acquire('n', { ttlMs: 60_000 })
    const waits = [0, 1, 2].map(() => rejects(locks.acquire('n', { waitMs: Infinity, ttlMs: 1000 }), 'LOCK_STORE'))
    await waiting(locks, 3)
    await fixture.proxy.down()
    await Promise.all(waits)
    // The clean-up goes on for as long as the ttl.
    await sleep(3000)
    assert.equal(await redis.zcount(queue(fixture), 0, '+inf'), 3)
    await fixture.proxy.up()
    const served = []
    const { turns } = await line(locks, served)
    const releasedAt = performance.now()
    assert.equal(await held.release(), true)
    await turns
    // Their process is alive again, and says that it does not know them.
    assert.ok(performance.now() - releasedAt < SOON_MS)
    assert.deepEqual(served, [0, 1, 2, 3])
    await until('nothing is left', async () => (await redis.exists(queue(fixture))) === 0)
  })

  test('SCRIPT FLUSH while waiting is nothing to notice', async (fixture, t) => {
    const { redis } = open(fixture, t)
    const locks = await fixture.connect()
    for (let round = 0; round < 5; round++) {
      const held = await fixture.direct.acquire('n')
      const turns = Promise.all([0, 1, 2].map(() => locks.using('n', () => redis.script('FLUSH'))))
      await waiting(locks, 3)
      await redis.script('FLUSH')
      assert.equal(await held.release(), true)
      await turns
    }
    assert.equal(locks.stats().storeErrors, 0)
    assert.equal(fixture.direct.stats().storeErrors, 0)
  })

  test('a connection that is cut while waiting: served at once, and in order', async (fixture, t) => {
    const { redis } = open(fixture, t)
    const locks = await fixture.connect()
    for (let round = 0; round < 5; round++) {
      const held = await fixture.direct.acquire('n', { ttlMs: 60_000 })
      const served = []
      const { turns } = await line(locks, served)
      const cutAt = performance.now()
      await redis.client('KILL', 'TYPE', 'pubsub')
      if (round % 2) await sleep(20 * round)
      assert.equal(await held.release(), true)
      await turns
      assert.ok(performance.now() - cutAt < 4000 + SOON_MS)
      assert.deepEqual(served, [0, 1, 2, 3])
    }
  })
})
