// A server that is full, history that is compacted, names with thousands of entries, a holder that is suspended, and members that are lost or cut off.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { LockService } from '../../index.js'
import { start } from '../children/start.mjs'
import { random, skip } from '../stores.mjs'
import { inspectHeld, later, rejects, sleep, until, waiting } from '../tools.mjs'
import { suspend } from '../waiter-processes.mjs'

/** Declares the suite. `driver` starts servers and has another client; see `drivers/`. */
export function faults(driver) {
  describe(`${driver.kind}: faults of the servers`, { timeout: 600_000 }, () => {
    let reason = ''
    /** @type {any} */
    let server
    /** @type {any} */
    let cluster
    before(async () => {
      await driver.locate().catch((error) => (reason = error.message))
      if (reason) return
      ;[server, cluster] = await Promise.all([driver.start(), driver.startCluster({ detectsLate: true })])
    })
    after(() => Promise.all([server?.stop(), cluster?.stop()]))

    /** Declares a test with a function that connects services, which are closed at its end. */
    const test = (title, body) =>
      it(title, { timeout: 240_000 }, async (t) => {
        if (reason) return skip(t, reason)
        const keyPrefix = `test/${random()}/`
        const services = []
        const connect = async (options = {}, url = driver.url(server)) => {
          services.push(await LockService.connect(url, { keyPrefix, ...options }))
          return services.at(-1)
        }
        try {
          await body(connect, keyPrefix, t)
        } finally {
          cluster.heal()
          for (const member of cluster.members) member.resume()
          await Promise.all(services.map((service) => service.close()))
        }
      })
    const assertNoneLost = (...services) => services.forEach((service) => assert.equal(service.stats().lost, 0))

    /** Declares a test with a server and a service. */
    const ownServer = (title, how, body) =>
      test(title, async (connect, keyPrefix) => {
        const own = await driver.start(how)
        try {
          const locks = await connect({ storeTimeoutMs: 10_000 }, driver.url(own))
          await body(locks, own, keyPrefix)
          assertNoneLost(locks)
          await locks.close()
        } finally {
          await own.stop()
        }
      })

    if (driver.compact)
      test('a lock is renewed and released while the history is compacted, and a waiter is served', async (connect, keyPrefix) => {
        const [a, b] = [await connect(), await connect()]
        const held = await a.acquire('n', { ttlMs: 5000 })
        const wait = later(b.acquire('n', { waitMs: 60_000 }))
        await waiting(b, 1)
        for (let round = 0; round < 12; round++) {
          const remove = await driver.addEntries(server, `${keyPrefix}other-${round}`, 100)
          await driver.compact(server)
          await remove()
          await sleep(500)
        }
        assert.ok(held.isHeld)
        assert.equal(await held.release(), true)
        const next = await wait
        assert.ok(next.fencingToken > held.fencingToken)
        assert.equal(await next.release(), true)
        assertNoneLost(a, b)
      })

    test('a name with 10000 entries has one holder, and a waiter behind all of them', async (connect, keyPrefix) => {
      const [a, b] = [await connect(), await connect()]
      const held = await a.acquire('n', { ttlMs: 60_000 })
      const remove = await driver.addEntries(server, `${keyPrefix}n`, 10_000)
      let isGranted = false
      const wait = later(b.acquire('n', { waitMs: 100_000 }).finally(() => (isGranted = true)))
      await until('the waiter', async () => (await a.inspect('n'))?.waiting === 10_001, 30_000)
      assert.equal((await a.list())[0].waiting, 10_001)
      await held.extend(90_000)
      assert.equal(await held.release(), true)
      assert.equal(await a.tryAcquire('n'), null)
      assert.equal(isGranted, false)
      await remove()
      const next = await wait
      assert.ok(next.fencingToken > held.fencingToken)
      assert.equal((await inspectHeld(a, 'n')).waiting, 0)
      assert.equal(await next.release(), true)
      assertNoneLost(a, b)
    })

    ownServer(
      'entries that are too long for one reply are named in the error, and block no other name',
      {},
      async (locks, own, keyPrefix) => {
        const [held, other] = [await locks.acquire('n', { ttlMs: 9000 }), await locks.acquire('other', { ttlMs: 9000 })]
        const remove = await driver.addEntries(own, `${keyPrefix}n`, 17, 1_000_000)
        const wait = () => locks.acquire('n', { waitMs: 60_000, onStoreError: 'wait' })
        const calls = [() => locks.tryAcquire('n'), wait, () => locks.inspect('n'), () => locks.list()]
        // An attempt on etcd reads the first entry only, and its waiter reads again.
        const waiter = driver.errors.tooLong ? undefined : later(wait())
        // For longer than the lease.
        const end = performance.now() + 10_000
        for (let round = 0; performance.now() < end; round++) {
          if (waiter) assert.equal(await locks.tryAcquire('n'), null)
          for (const call of waiter ? [] : calls) {
            const error = await rejects(call(), 'LOCK_STORE', { retryable: false })
            assert.match(error.message, driver.errors.tooLong)
          }
          await locks.using(`another-${round}`, () => {})
          await sleep(500)
        }
        assert.ok(held.isHeld && other.isHeld)
        assert.equal(await held.release(), true)
        await remove()
        assert.equal(await (await (waiter ?? wait())).release(), true)
        assert.equal(await other.release(), true)
      },
    )

    test('a waiter of the only server, which is suspended, rejects', async (connect) => {
      // Its lease outlasts the test.
      const locks = await connect(driver.service && { ...driver.service, sessionTimeoutMs: 40_000 })
      const waits = await connect({ storeTimeoutMs: 1000 })
      const held = await locks.acquire('n', { ttlMs: 120_000 })
      let isOver = false
      const wait = rejects(waits.acquire('n', { waitMs: 60_000 }), 'LOCK_STORE', { retryable: true })
      wait.finally(() => (isOver = true)).catch(() => {})
      await until('the waiter', async () => (await inspectHeld(locks, 'n')).waiting === 1)
      // Until its watch is open.
      await sleep(1000)
      server.pause()
      // Without the time in which the test itself stands still.
      let tookMs = 0
      for (; !isOver; tookMs += 50) await sleep(50)
      server.resume()
      await wait
      // The client of etcd notices it within 5 s. It would notice after some more seconds that another connection is silent, too.
      assert.ok(tookMs < 7500, `after ${tookMs} ms`)
      assert.equal(await held.release(), true)
    })

    test('1000 waiters of two services are served one after the other', async (connect) => {
      // A service enters waiters of a name one after the other, each with a commit.
      const slow = { storeTimeoutMs: 100_000 }
      const [a, b] = [await connect(slow), await connect(slow)]
      const held = await a.acquire('n', { ttlMs: 60_000 })
      let [inside, last] = [0, held.fencingToken]
      const waits = Array.from({ length: 1000 }, (_, index) =>
        (index % 2 ? a : b).using('n', { waitMs: 200_000 }, (lock) => {
          assert.equal(++inside, 1)
          assert.ok(lock.fencingToken > last)
          last = lock.fencingToken
          inside--
        }),
      )
      const served = later(Promise.all(waits))
      await until('the waiters', () => a.stats().waiting + b.stats().waiting === 1000, 100_000)
      await until('their entries', async () => (await a.inspect('n'))?.waiting === 1000, 30_000)
      assert.equal(await held.release(), true)
      await served
      assert.equal(await a.inspect('n'), null)
      assertNoneLost(a, b)
    })

    ownServer(
      'a full server renews, and says what to do about new locks and releases',
      { isSmall: true },
      async (locks, own) => {
        const held = await locks.acquire('held', { ttlMs: 6000 })
        const makeRoom = await driver.fill(own)
        const error = await rejects(locks.tryAcquire('new'), 'LOCK_STORE', { retryable: true })
        assert.match(error.message, driver.errors.full)
        await sleep(7000)
        assert.ok(held.isHeld, 'renewals write nothing')
        // etcd with the alarm refuses transactions that write, and all of them above its quota.
        const released = await held.release().catch((error) => assert.match(error.message, /space exceeded/))
        assert.notEqual(released, false)
        await makeRoom()
        let again
        while (!again) again = await locks.tryAcquire('new').catch(() => null)
        assert.ok(again.fencingToken > held.fencingToken)
        assert.equal(await again.release(), true)
      },
    )

    test('a holder that stands still for longer than its lease knows the loss at once, and can acquire again', async (connect, keyPrefix, t) => {
      const options = { keyPrefix, ...driver.shortSession }
      const task = { url: driver.url(server), options, names: 'n', acquire: { ttlMs: 4500 } }
      const locks = await connect()
      const holder = start(t, 'hold', task)
      const first = BigInt(await holder.next('held'))
      const wait = later(locks.acquire('n', { waitMs: 60_000 }))
      await waiting(locks, 1)
      await suspend(holder)
      const next = await wait
      assert.ok(next.fencingToken > first)
      // For longer than a session, too.
      await sleep(3000)
      holder.send('block 0')
      holder.kill('SIGCONT')
      const { isHeld, aborted } = await holder.next('blocked')
      assert.deepEqual({ isHeld, aborted }, { isHeld: false, aborted: true })
      holder.send('release')
      assert.equal(await holder.next('released'), false)
      assert.equal((await inspectHeld(locks, 'n')).fencingToken, next.fencingToken)
      holder.send('again')
      await until('it waits', async () => (await locks.inspect('n'))?.waiting === 1)
      assert.equal(await next.release(), true)
      assert.ok(BigInt(await holder.next('again')) > next.fencingToken)
      await holder.endInput()
      assertNoneLost(locks)
    })

    // ZooKeeper's servers answer reads from their own memory.
    test('a member that lags behind shows no lock that was released elsewhere', async (connect) => {
      const leader = await cluster.leader()
      const late = [0, 1, 2].find((index) => index !== leader)
      const connected = [late, leader].map((index) =>
        connect({ ...driver.service, connectMs: 20_000 }, cluster.url(index)),
      )
      const [a, b] = await Promise.all(connected)
      const lost = (lock) => rejects(lock.extend(10_000), 'LOCK_LOST')
      for (const isGone of [
        lost,
        async () => assert.equal(await a.inspect('n'), null),
        async () => assert.deepEqual(await a.list(), []),
      ]) {
        const lock = await a.acquire('n', { ttlMs: 10_000 })
        cluster.delay?.(late, leader, 400)
        assert.equal(await b.forceRelease('n'), true)
        await isGone(lock)
        await lost(lock)
      }
    })

    // The follower answers reads for some seconds more: with reads as evidence ZooKeeper had two holders for 8 s.
    test('a follower that is cut off from its leader holds no lock that the leader grants to another process', async (connect) => {
      const leader = await cluster.leader()
      const [cut, other] = [0, 1, 2].filter((index) => index !== leader)
      const connected = [[cut], [leader, other]].map((members) =>
        connect({ connectMs: 20_000 }, cluster.url(...members)),
      )
      const [a, b] = await Promise.all(connected)
      const lock = await a.acquire('n', { ttlMs: 9000 })
      const lost = new Promise((resolve) => lock.signal.addEventListener('abort', () => resolve(performance.now())))
      const wait = later(b.acquire('n', { waitMs: 60_000 }).then((next) => ({ next, at: performance.now() })))
      await until('the waiter', async () => (await b.inspect('n'))?.waiting === 1)
      assert.ok(lock.isHeld)
      await cluster.silence(cut, leader)
      const cutAt = performance.now()
      const { next, at } = await wait
      assert.equal(lock.isHeld, false, 'two holders')
      const lostAt = /** @type {number} */ (await lost)
      assert.ok(lostAt < at, `lost ${lostAt - at} ms after the next grant`)
      assert.ok(at - cutAt > 4000, 'the session lasts for a while')
      assert.ok(next.fencingToken > lock.fencingToken)
      await next.release()
    })

    // The old leader answered its clients for 10 s more: with syncs as evidence ZooKeeper had two holders for 2 s.
    test('a leader that is cut off while the others elect at once holds no lock that the next one grants', async (connect) => {
      const leader = await cluster.leader()
      const others = [0, 1, 2].filter((index) => index !== leader)
      const a = await connect({ connectMs: 20_000 }, cluster.url(leader))
      const lock = await a.acquire('n', { ttlMs: 6000 })
      const lost = new Promise((resolve) => lock.signal.addEventListener('abort', () => resolve(performance.now())))
      await sleep(2000)
      for (const other of others) await cluster.silence(leader, other)
      // They would wait for the leader longer than it does for them.
      await Promise.all(others.map((other) => cluster.members[other].kill()))
      await Promise.all(others.map((other) => cluster.members[other].restart([])))
      const b = await connect({ connectMs: 30_000 }, cluster.url(...others))
      const next = await b.acquire('n', { waitMs: 60_000, onStoreError: 'wait' })
      const grantedAt = performance.now()
      assert.equal(lock.isHeld, false, 'two holders')
      const lostAt = /** @type {number} */ (await lost)
      assert.ok(lostAt < grantedAt, `lost ${lostAt - grantedAt} ms after the next grant`)
      assert.ok(next.fencingToken > lock.fencingToken)
      await next.release()
    })

    test('without a majority calls fail within their limit, and go on when it is back', async (connect) => {
      const leader = await cluster.leader()
      const a = await connect({ connectMs: 20_000, storeTimeoutMs: 2000 }, cluster.url(leader))
      const lock = await a.acquire('n', { ttlMs: 6000 })
      const stopped = cluster.members.filter((_, index) => index !== leader)
      for (const member of stopped) await member.kill()
      const began = performance.now()
      await rejects(a.acquire('other', { waitMs: 1000 }), 'LOCK_STORE', { retryable: true })
      assert.ok(performance.now() - began < 6000)
      await until('the lock is lost', () => !lock.isHeld, 20_000)
      await Promise.all(stopped.map((member) => member.restart()))
      const next = await until('a call is served', () => a.tryAcquire('n').catch(() => undefined), 60_000)
      assert.ok(next.fencingToken > lock.fencingToken)
      await next.release()
    })
  })
}
