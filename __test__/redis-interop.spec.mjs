// redlock, redis-semaphore, plain SET NX PX and holdfast on the same key exclude each other.
import assert from 'node:assert/strict'
import { Mutex } from 'redis-semaphore'
import Redlock from 'redlock'
import { openRedis } from './redis-client.mjs'
import { suite } from './stores.mjs'
import { rejects, sleep, SOON_MS, until, waiting } from './tools.mjs'

const SCRIPT = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"

/**
 * The other tools. Each one acquires the name `n` of the test's store and returns a lock, or `null` when it is busy.
 * redis-semaphore puts `mutex:` in front of every key.
 */
const TOOLS = {
  redlock: (redis, key) => {
    const redlock = new Redlock([redis], { retryCount: 0 })
    redlock.on('error', () => {})
    return async (ttlMs) => {
      const lock = await redlock.acquire([key], ttlMs).catch(() => null)
      return lock && { release: () => lock.release(), extend: () => lock.extend(ttlMs) }
    }
  },
  'redis-semaphore': (redis, key) => async (ttlMs) => {
    const mutex = new Mutex(redis, key.slice('mutex:'.length), {
      lockTimeout: ttlMs,
      refreshInterval: 0,
      acquireAttemptsLimit: 1,
    })
    if (!(await mutex.tryAcquire())) return null
    // @ts-expect-error: the method is protected. The mutex calls it in its own interval.
    return { release: () => mutex.release(), extend: () => mutex._refresh() }
  },
  'SET NX PX': (redis, key) => async (ttlMs) => {
    const token = Math.random().toString(36)
    if ((await redis.set(key, token, 'PX', ttlMs, 'NX')) !== 'OK') return null
    return { release: () => redis.eval(SCRIPT, 1, key, token), extend: () => redis.pexpire(key, ttlMs) }
  },
}

suite('redis', 'with other tools', (test) => {
  const on = (title, body) => {
    for (const [name, tool] of Object.entries(TOOLS)) {
      test(`${name}: ${title}`, async (store) => {
        store.options.keyPrefix = `mutex:${store.options.keyPrefix}`
        const redis = openRedis(store.target)
        try {
          await body({
            store,
            redis,
            key: `${store.options.keyPrefix}n`,
            acquire: tool(redis, `${store.options.keyPrefix}n`),
          })
        } finally {
          redis.disconnect()
        }
      })
    }
  }

  on('each tool excludes the other', async ({ store, acquire }) => {
    const locks = await store.connect()
    const ours = await locks.acquire('n', { ttlMs: 20_000 })
    assert.equal(await acquire(20_000), null)
    await ours.extend(30_000)
    assert.equal(await acquire(20_000), null)
    assert.equal(await ours.release(), true)
    const theirs = await acquire(20_000)
    assert.ok(theirs)
    assert.equal(await locks.tryAcquire('n'), null)
    assert.equal(await locks.acquireLock('n'), false)
    await rejects(locks.acquire('n', { waitMs: 50 }), 'LOCK_TIMEOUT')
    await theirs.extend()
    assert.equal(await locks.releaseLock('n'), false)
    assert.equal(await locks.tryAcquire('n'), null)
    await theirs.release()
    assert.equal(await (await locks.tryAcquire('n')).release(), true)
  })

  on('waiters are served after its release, which publishes no message', async ({ store, acquire }) => {
    const services = await store.connectAll(2)
    const theirs = await acquire(60_000)
    const served = []
    const waits = []
    for (let index = 0; index < 6; index++) {
      const service = services[index % 2]
      waits.push(service.using('n', { waitMs: 60_000, ttlMs: 60_000 }, () => served.push(index)))
      await waiting(service, 1 + Math.floor(index / 2))
    }
    await theirs.release()
    const releasedAt = performance.now()
    await Promise.all(waits)
    // At the next heartbeat.
    assert.ok(performance.now() - releasedAt < 2000 + SOON_MS)
    assert.deepEqual(served, [0, 1, 2, 3, 4, 5])
    const again = await acquire(1000)
    assert.ok(again)
    await again.release()
  })

  on('the tool never overtakes waiters in the queue', async ({ store, acquire }) => {
    const locks = await store.connect()
    const held = await locks.acquire('n')
    let [left, tries] = [30, 0]
    // The other tool makes at least one attempt while each waiter holds the name.
    const job = async () => {
      const before = tries
      while (tries === before) await sleep(1)
      left--
    }
    const calls = Array.from({ length: left }, () => locks.using('n', { waitMs: 60_000 }, job))
    await waiting(locks, left)
    const trying = (async () => {
      for (;;) {
        const theirs = await acquire(5000)
        tries++
        if (!theirs) continue
        assert.equal(left, 0, 'it overtook the queue')
        return theirs.release()
      }
    })()
    assert.equal(await held.release(), true)
    await Promise.all(calls)
    await trying
  })

  on('increments of an unprotected counter under either lock are not lost', async ({ store, acquire }) => {
    const [a, b] = await store.connectAll(2)
    let [counter, inside] = [0, 0]
    const add = async () => {
      assert.equal(++inside, 1)
      const seen = counter
      await sleep(1)
      counter = seen + 1
      inside--
    }
    const ours = async (locks) => {
      for (let round = 0; round < 20; round++) {
        await locks.using('n', { waitMs: 60_000 }, add)
        // Leaves the name free at times, for tools without a position in the queue.
        await sleep(Math.random() * 20)
      }
    }
    const others = async () => {
      for (let round = 0; round < 10; round++) {
        const lock = await until('a grant', () => acquire(10_000), 30_000)
        await add()
        await lock.release()
      }
    }
    await Promise.all([ours(a), ours(b), others(), others()])
    assert.equal(counter, 60)
  })
})
