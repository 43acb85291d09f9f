// Stores that are down, hang or restart: a clear error in time, leases that end when they must, and recovery.
import assert from 'node:assert/strict'
import { LockService } from '../index.js'
import { SERVER_KINDS, SERVERS, SLACK_MS, proxySuite, startProxy } from './proxy.mjs'
import { openRedis } from './redis-client.mjs'
import { inspectHeld, prepared, rejects, sleep, unlessStalled, until, waiting } from './tools.mjs'

const STORE_TIMEOUT_MS = 1500

/** Makes every call that needs the store. Asserts that each one rejects in time with LOCK_STORE. */
async function assertAllFail(kind, locks, port, { held, gist }) {
  const json = held.transferable()
  let ran = 0
  const run = () => ran++
  const calls = {
    acquire: () => locks.acquire('a', { waitMs: 60_000, ttlMs: 60_000 }),
    'acquire of two': () => locks.acquire(['b', 'c'], { ttlMs: 60_000 }),
    'acquire with waitMs 0': () => locks.acquire('d', { waitMs: 0, ttlMs: 60_000 }),
    tryAcquire: () => locks.tryAcquire('e', { ttlMs: 60_000 }),
    using: () => locks.using('f', { ttlMs: 60_000 }, run),
    acquireAndExecute: () => locks.acquireAndExecute('g', 60, run),
    acquireLock: () => locks.acquireLock('h', 60),
    releaseLock: () => locks.releaseLock(gist),
    inspect: () => locks.inspect('i'),
    list: () => locks.list(),
    forceRelease: () => locks.forceRelease('j'),
    restore: () => locks.restore({ ...json, names: ['k'], token: '0'.repeat(32) }),
    extend: () => held.extend(120_000),
  }
  const startedAt = performance.now()
  await Promise.all(
    Object.entries(calls).map(async ([what, call]) => {
      const error = await rejects(call(), 'LOCK_STORE', { retryable: true, engine: SERVERS[kind].engine }).catch(
        (error) => {
          throw new Error(`${what}: ${error.message}`, { cause: error })
        },
      )
      const tookMs = performance.now() - startedAt
      assert.ok(tookMs < STORE_TIMEOUT_MS + SLACK_MS, `${what} took ${tookMs} ms`)
      assert.ok(error.cause instanceof Error, what)
      // A driver's own error does not always say it.
      if (/no answer within/.test(error.message)) {
        assert.match(error.message, new RegExp(`no answer within [1-9]\\d* ms \\(.*\\b${port}\\b`), what)
      }
    }),
  )
  assert.equal(ran, 0)
  // The lease outlasts the outage.
  assert.equal(held.isHeld, true)
  await rejects(held.release(), 'LOCK_STORE', { retryable: true, key: 'held' })
  assert.equal(held.isHeld, false)
}

async function assertWorks(locks) {
  await until('the store is back', () =>
    locks.inspect('any').then(
      () => true,
      () => false,
    ),
  )
  await unlessStalled(async (attempt) => {
    const name = `again${attempt}`
    assert.equal(await locks.using(name, (lock) => lock.isHeld), true)
    assert.equal(await locks.acquireLock(name, 60), true)
    assert.equal(await locks.releaseLock(name), true)
  })
}

const assertNothingLeft = (direct) => until('nothing is left', async () => (await direct.list()).length === 0, 20_000)

async function prepare(fixture, options) {
  const locks = await fixture.warm({ storeTimeoutMs: STORE_TIMEOUT_MS, ...options })
  const held = await prepared(() => locks.acquire('held', { ttlMs: 60_000 }))
  // A call that was repeated may find the lock of the one before, until that is rolled back.
  await until('the lock of the gist', () => prepared(() => locks.acquireLock('gist', 60)))
  return { locks, held, gist: 'gist' }
}

/**
 * Returns the options for a store where the locks of a process end with its session: one that ends within a test.
 *
 * @param {string} kind
 */
const sessionOf = (kind) => (kind === 'zookeeper' ? { sessionTimeoutMs: 8000 } : {})

for (const kind of SERVER_KINDS) {
  proxySuite(kind, 'outages', {}, (test) => {
    test('calls reject while the store refuses connections, and succeed again afterwards', async ({
      proxy,
      direct,
      ...fixture
    }) => {
      const { locks, ...own } = await prepare(fixture)
      await proxy.down()
      await assertAllFail(kind, locks, proxy.port, own)
      await proxy.up()
      await assertWorks(locks)
      await assertNothingLeft(direct)
    })

    test('calls reject while the network drops everything, and succeed again afterwards', async ({
      proxy,
      direct,
      ...fixture
    }) => {
      const { locks, ...own } = await prepare(fixture)
      proxy.freeze()
      await assertAllFail(kind, locks, proxy.port, own)
      proxy.resume()
      await assertWorks(locks)
      await assertNothingLeft(direct)
    })

    test('connect to a port without a listener rejects in time', async () => {
      const proxy = await startProxy(1)
      await proxy.down()
      const startedAt = performance.now()
      const { url, options } = SERVERS[kind]
      const call = LockService.connect(url(proxy.port), { storeTimeoutMs: STORE_TIMEOUT_MS, ...options })
      await rejects(call, 'LOCK_STORE', { retryable: true, engine: SERVERS[kind].engine })
      assert.ok(performance.now() - startedAt < STORE_TIMEOUT_MS + SLACK_MS)
    })

    test('connect to a server that does not answer rejects in time', async ({ proxy }) => {
      proxy.freeze()
      const startedAt = performance.now()
      const { url, options } = SERVERS[kind]
      const call = LockService.connect(url(proxy.port), { storeTimeoutMs: STORE_TIMEOUT_MS, ...options })
      const error = await rejects(call, 'LOCK_STORE', { retryable: true, engine: SERVERS[kind].engine })
      assert.ok(error.message.includes(`:${proxy.port}`), error.message)
      assert.ok(performance.now() - startedAt < STORE_TIMEOUT_MS + SLACK_MS)
    })

    // The error of MongoDB's driver for a reset connection does not contain the address, and a waiter that polls fails with LOCK_STORE.
    if (!kind.startsWith('mongodb')) {
      test('a connection that breaks during a call is named with its address', async ({ proxy, ...fixture }) => {
        const locks = await fixture.warm({ storeTimeoutMs: STORE_TIMEOUT_MS })
        proxy.freeze()
        const calls = [locks.inspect('held'), locks.list(), locks.forceRelease('held')]
        const errors = Promise.all(calls.map((call) => rejects(call, 'LOCK_STORE', { retryable: true })))
        await sleep(50)
        await proxy.down()
        for (const error of await errors) assert.ok(error.message.includes(`:${proxy.port}`), error.message)
        await proxy.up()
        proxy.resume()
      })

      test('the error of a wait says that the store was silent at its end', async ({ proxy, direct, ...fixture }) => {
        // Longer than the wait, which would otherwise end with the failure of its attempt.
        const { locks } = await prepare(fixture, { storeTimeoutMs: 8000 })
        const waiter = rejects(locks.acquire('held', { waitMs: 5000 }), 'LOCK_TIMEOUT')
        await waiting(locks, 1)
        proxy.freeze()
        const { message, holder } = await waiter
        assert.equal(holder, null)
        assert.match(message, /was still busy after 5000 ms: its holder is not known \(\w+: inspect failed: .*:\d+/)
        proxy.resume()
        for (const name of ['held', 'gist']) await direct.forceRelease(name)
        await assertNothingLeft(direct)
      })
    }

    test('close() while the store is down resolves in time', async ({ proxy, direct, ...fixture }) => {
      const { locks } = await prepare(fixture, sessionOf(kind))
      const waiter = rejects(locks.acquire('held', { waitMs: 60_000 }), 'LOCK_CLOSED')
      await waiting(locks, 1)
      await proxy.down()
      const startedAt = performance.now()
      await locks.close()
      await waiter
      assert.ok(performance.now() - startedAt < STORE_TIMEOUT_MS + SLACK_MS)
      for (const name of ['held', 'gist']) await direct.forceRelease(name)
      // A release may hand the name to the waiter, whose process could not leave the queue.
      await assertNothingLeft(direct)
    })

    const outages = {
      'refused connections': [(proxy) => proxy.down(), (proxy) => proxy.up()],
      silence: [(proxy) => proxy.freeze(), (proxy) => proxy.resume()],
    }
    for (const [what, [begin, end]] of Object.entries(outages)) {
      test(`${what} for less than the ttl: the lease is kept and renewed again`, async ({
        proxy,
        direct,
        ...fixture
      }) => {
        const ttlMs = 9000
        const locks = await fixture.warm()
        const lock = await locks.acquire('name', { ttlMs })
        const firstEnd = performance.now() + lock.remainingMs
        // The token that `inspect` shows is written after the grant.
        await until('the token', async () => (await direct.inspect('name'))?.fencingToken)
        await begin(proxy)
        // A renewal is due after a third of the ttl.
        await until('a renewal is late', () => lock.remainingMs < ttlMs * 0.6)
        const { renewed } = locks.stats()
        await end(proxy)
        await until('the lease is renewed again', () => locks.stats().renewed > renewed)
        await sleep(Math.max(0, firstEnd + 500 - performance.now()))
        assert.equal(lock.isHeld, true)
        assert.equal(lock.signal.aborted, false)
        assert.equal((await direct.inspect('name'))?.fencingToken, lock.fencingToken)
        assert.equal(locks.stats().lost, 0)
        assert.equal(await lock.release(), true)
      })

      test(`${what} for longer than the ttl: the lease is lost locally before it expires at the store`, async ({
        proxy,
        direct,
        ...fixture
      }) => {
        const ttlMs = 4000
        const locks = await fixture.warm(sessionOf(kind))
        const lock = await locks.acquire('name', { ttlMs })
        // Makes the service write its deferred record now: a later `inspect` would wait for it and return a shorter time.
        await locks.inspect('name')
        await begin(proxy)
        // The expiry at the store. Counted from before the request, so that the estimate is never too late.
        let storeEnd = 0
        for (let attempt = 0; attempt < 10; attempt++) {
          const requestedAt = performance.now()
          storeEnd = Math.max(storeEnd, requestedAt + (await inspectHeld(direct, 'name')).remainingMs)
        }
        const localEnd = performance.now() + lock.remainingMs
        assert.ok(localEnd < storeEnd, `local end ${localEnd}, end at the store ${storeEnd}`)

        const taken = direct.acquire('name', { waitMs: 60_000 }).then((lock) => ({ lock, at: performance.now() }))
        const abortedAt = await new Promise((resolve) => {
          lock.signal.addEventListener('abort', () => resolve(performance.now()))
        })
        assert.ok(abortedAt > localEnd - 20, `${localEnd - abortedAt} ms too early`)
        assert.ok(abortedAt < localEnd + SLACK_MS, `${abortedAt - localEnd} ms too late`)
        assert.equal(lock.isHeld, false)
        assert.equal(lock.signal.reason.code, 'LOCK_LOST')
        assert.equal(lock.signal.reason.key, 'name')

        const next = await taken
        assert.ok(next.at > localEnd)
        assert.ok(next.lock.fencingToken > lock.fencingToken)
        await end(proxy)
        await assertWorks(locks)
        await sleep(500)
        // The service that lost the lease neither renews nor releases it.
        assert.equal((await direct.inspect('name'))?.fencingToken, next.lock.fencingToken)
        await rejects(lock.extend(1000), 'LOCK_LOST')
        assert.equal(await lock.release(), false)
        assert.equal(await next.lock.release(), true)
      })

      test(`${what}: a call that waits rejects`, async ({ proxy, direct, ...fixture }) => {
        // In a longer session, silence is noticed later: ZooKeeper's client sends 20 requests in it.
        const locks = await fixture.warm({ storeTimeoutMs: STORE_TIMEOUT_MS, ...sessionOf(kind) })
        const held = await direct.acquire('name', { ttlMs: 60_000 })
        const wait = rejects(locks.acquire('name', { waitMs: 60_000 }), 'LOCK_STORE', { retryable: true })
        await waiting(locks, 1)
        await begin(proxy)
        const startedAt = performance.now()
        await wait
        // After the next poll, where the wait depends on it.
        const limitMs = 5000 + 2 * STORE_TIMEOUT_MS + 2000 + SLACK_MS
        assert.ok(performance.now() - startedAt < limitMs, `after ${performance.now() - startedAt} ms`)
        await end(proxy)
        assert.equal(await held.release(), true)
        await assertNothingLeft(direct)
      })

      test(`${what}: waiters are served when the store is back`, async ({ proxy, direct, ...fixture }) => {
        const locks = await fixture.warm({ storeTimeoutMs: 4000 })
        const held = await direct.acquire('name', { ttlMs: 60_000 })
        const acquireAndRelease = async () => (await locks.acquire('name', { waitMs: 60_000 })).release()
        const calls = Promise.all(Array.from({ length: 3 }, acquireAndRelease))
        await waiting(locks, 3)
        await begin(proxy)
        await held.release()
        await sleep(1500)
        await end(proxy)
        const backAt = performance.now()
        assert.deepEqual(await calls, [true, true, true])
        // By a wake-up, or by the safety poll of 5 s.
        assert.ok(performance.now() - backAt < 5000 + SLACK_MS, `${performance.now() - backAt} ms`)
      })
    }
  })

  // The server behind the proxy has no TLS.
  if (kind === 'redis-tls') continue
  proxySuite(kind, 'servers that stop', { serverPerTest: true }, (test) => {
    test('calls reject while the server is stopped, and succeed again afterwards', async ({
      server,
      direct,
      ...fixture
    }) => {
      const { locks, ...own } = await prepare(fixture)
      await server.pause()
      try {
        await assertAllFail(kind, locks, fixture.proxy.port, own)
        const call = LockService.connect(SERVERS[kind].url(server.port), { storeTimeoutMs: STORE_TIMEOUT_MS })
        await rejects(call, 'LOCK_STORE', { retryable: true, engine: SERVERS[kind].engine })
      } finally {
        server.resume()
      }
      await assertWorks(locks)
      // The server executed the requests late: the locks are released all the same.
      await assertNothingLeft(direct)
    })

    test('a server that restarts', async ({ server, direct, ...fixture }) => {
      const locks = await fixture.warm({ storeTimeoutMs: 30_000 })
      const long = await locks.acquire('long', { ttlMs: 60_000 })
      // Its limit is longer than a restart on a busy machine.
      const other = await fixture.connect({ storeTimeoutMs: 30_000 }, server.port)
      // Not renewed: with renewals the lease would survive a restart within a second.
      const short = await locks.acquire('short', { ttlMs: 4500, renew: false })
      const waiter = other.acquire('short', { waitMs: 60_000 })
      await waiting(other, 1)
      const before = long.fencingToken
      await server.restart()
      const next = await waiter
      assert.ok(next.fencingToken > short.fencingToken)
      assert.equal(await next.release(), true)
      if (kind === 'redis') {
        // Redis has no persistence here: the lease is lost, and is not created again.
        await rejects(long.extend(70_000), 'LOCK_LOST')
        assert.equal(long.signal.aborted, true)
        assert.equal(await direct.inspect('long'), null)
      } else {
        await long.extend(70_000)
        assert.equal((await direct.inspect('long'))?.fencingToken, before)
        assert.equal(await direct.tryAcquire('long'), null)
        assert.equal(await long.release(), true)
      }
      await assertWorks(locks)
      const again = await locks.acquire('long')
      assert.ok(again.fencingToken > before)
      await again.release()
    })

    if (kind === 'redis') return
    test('a lock survives a crash of the server, and so does the time that a name is kept busy', async ({
      server,
      direct,
      ...fixture
    }) => {
      const locks = await fixture.warm({ storeTimeoutMs: 15_000 })
      const lock = await locks.acquire('name', { ttlMs: 60_000 })
      const kept = await locks.acquire('kept', { minHoldMs: '1h' })
      assert.equal(await kept.release(), true)
      await server.kill()
      await server.restart()
      await until('the server is back', () =>
        direct.inspect('name').then(
          (info) => info,
          () => null,
        ),
      )
      for (const name of ['name', 'kept']) assert.equal(await direct.tryAcquire(name), null, name)
      assert.equal(await lock.release(), true)
      assert.equal(await direct.forceRelease('kept'), true)
      for (const { name, fencingToken } of [lock, kept]) {
        const next = await direct.acquire(name)
        assert.ok(next.fencingToken > fencingToken)
        await next.release()
      }
    })
  })
}

proxySuite('redis', 'scripts', { serverPerTest: true }, (test) => {
  test('calls succeed while the script cache is flushed all the time', async ({ server, ...fixture }) => {
    const locks = await fixture.warm()
    const redis = openRedis(server.url)
    let [flushes, isStopped] = [0, false]
    const flushing = (async () => {
      for (; !isStopped; flushes++, await sleep(2)) await redis.script('FLUSH')
    })()
    const work = async (index) => {
      for (let round = 0; round < 30; round++) {
        const lock = await locks.acquire([`n:${index % 5}`, `m:${index}`], { waitMs: 60_000 })
        await lock.extend(40_000)
        assert.notEqual(await locks.inspect(`m:${index}`), null)
        assert.equal(await lock.release(), true)
      }
    }
    await Promise.all(Array.from({ length: 10 }, (_, index) => work(index)))
    isStopped = true
    await flushing
    redis.disconnect()
    assert.ok(flushes > 10, `only ${flushes} flushes`)
    assert.equal(locks.stats().storeErrors, 0)
  })
})
