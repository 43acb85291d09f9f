// Faults of an SQL server that every dialect has: it stalls, its tables are locked, it is killed, it ends connections, and it has limits.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { LockService } from '../../index.js'
import { SLACK_MS, startProxy } from '../proxy.mjs'
import { canStartServer } from '../stores.mjs'
import { later, prepared, rejects, rejection, sleep, stopwatch, until, waiting } from '../tools.mjs'

/** The limit of calls that are to reach it. */
const STORE_TIMEOUT_MS = 1500

/** Makes pairs of calls on few names until `end()`, and checks that no two callers hold a name, and that its tokens grow. */
export function load(locks, { names = 3, callers = 12 } = {}) {
  const [holders, tokens] = [new Map(), new Map()]
  const counts = { granted: 0, failed: 0, last: 0 }
  let isEnding = false
  const loops = Array.from({ length: callers }, async (_, caller) => {
    while (!isEnding) {
      const wanted = caller % 4 === 0 ? ['n0', 'n1'] : [`n${caller % names}`]
      try {
        const lock = await locks[caller % locks.length].acquire(wanted, { ttlMs: 20_000, waitMs: 5000 })
        for (const name of wanted) {
          assert.equal(holders.get(name), undefined, `two callers hold ${name}`)
          holders.set(name, caller)
          assert.ok(lock.fencingToken > (tokens.get(name) ?? 0n), `the token of ${name} grows`)
          tokens.set(name, lock.fencingToken)
        }
        counts.granted++
        counts.last = performance.now()
        await sleep(1)
        for (const name of wanted) holders.delete(name)
        await lock.release()
      } catch (error) {
        if (error.code !== 'LOCK_STORE' && error.code !== 'LOCK_TIMEOUT') throw error
        assert.equal(error.retryable, true, error.message)
        counts.failed++
        await sleep(5)
      }
    }
  })
  for (const loop of loops) later(loop)
  const end = async () => {
    isEnding = true
    await Promise.all(loops)
  }
  return { counts, end }
}
export const grantAfter = async (counts, at) => {
  await until('a grant after the fault', () => counts.last > at, 20_000)
  return counts.last - at
}

/**
 * Makes concurrent calls, and checks that all succeed although the server allows one connection.
 *
 * @param {LockService} locks
 */
async function shareOneConnection(locks) {
  const leases = await Promise.all([0, 1, 2].map((number) => locks.acquire(`held:${number}`, { ttlMs: 30_000 })))
  // Longer than the store timeout, so that a call that never gets the connection is rejected within the test.
  const end = performance.now() + 8000
  /** @param {() => Promise<unknown>} call */
  const repeat = async (call) => {
    let calls = 0
    // A machine that stands still gets twice the time.
    for (; performance.now() < end || (calls < 10 && performance.now() < end + 8000); calls++) await call()
    assert.ok(calls >= 10, `${calls} calls`)
  }
  await Promise.all([
    ...[1, 2, 3, 4].map((number) => repeat(() => locks.using(`used:${number}`, () => {}))),
    repeat(() => locks.using(['several', 'names'], () => {})),
    ...leases.map((lease) => repeat(() => lease.extend(30_000))),
    repeat(() => locks.list()),
  ])
  // Calls that do not overlap.
  for (let call = 0; call < 10; call++) await locks.using('used:1', () => {})
  assert.deepEqual(await Promise.all(leases.map((lease) => lease.release())), [true, true, true])
}

/**
 * Declares the suite, then calls `cases` with the helpers for the cases of this dialect. `driver`: see `drivers/postgres.mjs`.
 *
 * @param {any} driver
 * @param {(suite: any) => void} cases
 */
export function sqlFaults(driver, cases) {
  describe(`${driver.kind}: faults of the server`, { concurrency: 1 }, () => {
    /** @type {any} */
    let server
    let isUnable = true
    const services = []
    const connect = async (options, url = server.url) => {
      const patient = { storeTimeoutMs: 4000, connectMs: 20_000 }
      const service = await LockService.connect(url, { ...patient, ...options })
      services.push(service)
      return service
    }
    const closeAll = () => Promise.all(services.splice(0).map((service) => service.close()))
    const withQuery = (body) => driver.connected(server.url, body)
    const query = (...texts) => driver.query(server, ...texts)
    const userWith = (limits) => driver.userWith(server, limits)

    const skipped = []
    before(async () => {
      const can = { skip: (reason) => skipped.push(reason) }
      if (!(await canStartServer(can, driver.kind, driver.locate))) return
      server = await driver.start()
      // Creates the tables, for users without that privilege.
      await (await LockService.connect(server.url)).close()
      isUnable = false
    })
    after(async () => {
      await closeAll()
      await server?.stop()
    })
    const test = (name, body) =>
      it(name, { timeout: 90_000 }, async (t) => {
        if (isUnable) return t.skip(skipped[0])
        try {
          await body()
          await closeAll()
          const witness = await connect()
          await until('nothing is left', async () => (await witness.list()).length === 0)
        } finally {
          await closeAll()
        }
      })

    test('tables that are dropped, as by a migration tool: leases are lost, and a warning says why', async () => {
      const warned = new Promise((resolve) => {
        process.on('warning', function check(warning) {
          if (!/tables of the locks .* were dropped/.test(warning.message)) return
          process.off('warning', check)
          resolve(warning)
        })
      })
      const locks = await connect({ table: 'dropped', storeTimeoutMs: 10_000 })
      const lock = await locks.acquire('n', { ttlMs: 4500 })
      const waiting = later(locks.acquire('n', { waitMs: 30_000 }))
      await until('it waits', async () => (await locks.inspect('n'))?.waiting === 1)
      await query(driver.dropTables)
      await until('the lease is lost', () => lock.signal.aborted)
      assert.equal(lock.signal.reason.code, 'LOCK_LOST')
      assert.equal((await warned).code, 'HOLDFAST_STORE')
      const next = await waiting
      assert.ok(next.fencingToken > lock.fencingToken)
      await next.release()
    })

    test('a stall of the server: calls reject in time, leases outlast it', async () => {
      const locks = await connect({ storeTimeoutMs: STORE_TIMEOUT_MS })
      const held = await prepared(() => locks.acquire('held', { ttlMs: 20_000 }))
      const waiter = later(locks.acquire('held', { waitMs: 60_000, onStoreError: 'wait' }))
      await waiting(locks, 1)
      await server.pause()
      try {
        const elapsedMs = stopwatch()
        const calls = Array.from({ length: 200 }, (_, i) =>
          rejects(locks.tryAcquire(`free:${i}`, { ttlMs: 30_000 }), 'LOCK_STORE', { retryable: true }),
        )
        await Promise.all([...calls, rejects(locks.inspect('held'), 'LOCK_STORE', { retryable: true })])
        const tookMs = elapsedMs()
        assert.ok(tookMs < STORE_TIMEOUT_MS + SLACK_MS, `${tookMs} ms`)
        await sleep(2000)
      } finally {
        server.resume()
      }
      await until('the server is used again', () => locks.tryAcquire('again').catch(() => null)).then((lock) =>
        lock.release(),
      )
      assert.equal(held.isHeld, true)
      assert.equal(await held.release(), true)
      assert.equal(await (await waiter).release(), true)
    })

    test('tables that another program has locked: calls reject in time, a lease stays held', async () => {
      const locks = await connect({ storeTimeoutMs: STORE_TIMEOUT_MS })
      const held = await prepared(() => locks.acquire('held', { ttlMs: 20_000 }))
      await withQuery(async (run) => {
        await run(driver.lockTables)
        const calls = [
          locks.tryAcquire('free'),
          locks.acquire(['two', 'names']),
          locks.acquire('held', { waitMs: 500 }),
        ]
        for (const error of await Promise.all(calls.map(rejection))) {
          assert.equal(error.code, 'LOCK_STORE', error.message)
          assert.equal(error.retryable, true)
        }
        // A renewal may be waiting.
        await until('few statements wait', async () => (await query(driver.waitingStatements)).length <= 2)
        await run(driver.unlockTables)
      })
      assert.equal(await locks.using('free', (lock) => lock.isHeld), true)
      assert.equal(held.isHeld, true)
      assert.equal(await held.release(), true)
    })

    test('a row that another program locks for 1.5 s: calls succeed in their order, and the service stays connected', async () => {
      const events = []
      const locks = await connect({
        storeTimeoutMs: 10_000,
        onEvent: (event) => event.type === 'disconnected' && events.push(event.reason),
      })
      const lock = await locks.acquire('n', { ttlMs: 20_000 })
      await withQuery(async (run) => {
        const whileLocked = async (call) => {
          await run(driver.lockRow('n'))
          const unlocked = sleep(1500).then(() => run('ROLLBACK'))
          return (await Promise.all([call(), unlocked]))[0]
        }
        await whileLocked(() => lock.extend(20_000))
        assert.equal(await whileLocked(() => lock.release()), true)
        const taken = await whileLocked(() => locks.tryAcquire('n'))
        assert.equal(await whileLocked(() => locks.forceRelease('n')), true)
        assert.equal(await taken.release(), false)
        // Renewed after 4 s. A renewal of a shorter lease would have less time than the statement waits for the row.
        const renewed = await locks.acquire('n', { ttlMs: 12_000 })
        const before = locks.stats().renewed
        await sleep(3500)
        await whileLocked(() => sleep(3000))
        assert.equal(locks.stats().renewed, before + 1)
        assert.equal(await renewed.release(), true)
        const order = []
        const waits = async (number) => {
          const granted = await locks.acquire('n', { waitMs: 20_000 })
          order.push(number)
          await granted.release()
        }
        const numbers = Array.from({ length: 20 }, (_, number) => number)
        await whileLocked(() => Promise.all(numbers.map(waits)))
        assert.deepEqual(order, numbers)
      })
      assert.ok(locks.stats().storeErrors > 0, 'calls have found the locked row')
      assert.deepEqual(events, [])
    })

    test('a server that is killed under load', async () => {
      const locks = [await connect(), await connect()]
      const held = await locks[0].acquire('held', { ttlMs: 30_000 })
      const { counts, end } = load(locks)
      await grantAfter(counts, 0)
      for (let round = 0; round < 2; round++) {
        await server.kill()
        await sleep(700)
        await server.restart()
        await grantAfter(counts, performance.now())
      }
      await end()
      assert.equal(held.isHeld, true)
      assert.equal(await held.release(), true)
      assert.equal(locks[0].stats().lost, 0)
    })

    test('connections that are ended again and again', async () => {
      const locks = [await connect(), await connect()]
      const held = await locks[0].acquire('held', { ttlMs: 6000 })
      const { counts, end } = load(locks)
      for (let round = 0; round < 20; round++) {
        await withQuery(driver.terminate)
        await sleep(150)
      }
      await grantAfter(counts, performance.now())
      await end()
      assert.equal(held.isHeld, true)
      assert.equal(await held.release(), true)
      assert.equal(locks[0].stats().lost, 0)
    })

    test('an idle service sends nothing', async () => {
      let requests = 0
      const proxy = await startProxy(server.port, { intercept: () => ++requests === 0 })
      const url = new URL(server.url)
      url.port = String(proxy.port)
      try {
        const locks = await connect({}, url.href)
        const held = await locks.acquire('n')
        const waiter = later(locks.acquire('n', { waitMs: 60_000 }))
        await waiting(locks, 1)
        await held.release()
        await (await waiter).release()
        // The statements that were executed for the first time are prepared in the background.
        let before
        do {
          before = requests
          await sleep(1000)
        } while (requests > before)
        assert.ok(before > 0)
        await sleep(5000)
        assert.equal(requests, before)
      } finally {
        await closeAll()
        await proxy.down()
      }
    })

    for (const { title, begin, end, error: expected, ...limits } of driver.fullServers) {
      test(`${title}: connect rejects with a retryable error, and calls use the open connection`, async () => {
        const address = await userWith(limits)
        const locks = await connect({}, address)
        assert.equal(await locks.using('one', (lock) => lock.isHeld), true)
        const clients = []
        if (begin) await query(begin)
        try {
          for (let isFull = false; !isFull;) {
            await driver.open(address).then(
              (client) => clients.push(client),
              () => (isFull = true),
            )
          }
          const error = await rejects(connect({ connectMs: 0 }, address), 'LOCK_STORE', { retryable: true })
          assert.match(error.message, expected)
          assert.equal(await locks.using(['two', 'names'], (lock) => lock.isHeld), true, 'the first connection works')
          assert.equal(await locks.using('one', (lock) => lock.isHeld), true, 'the first connection works')
        } finally {
          await Promise.all(clients.map((client) => client.end()))
          if (end) await query(end)
        }
        const another = await until('another connection', () => connect({ connectMs: 0 }, address).catch(() => null))
        assert.equal(await another.using('one', (lock) => lock.isHeld), true)
      })
    }

    test('a user that may open one connection: concurrent calls succeed', async () => {
      const address = await userWith({ limits: driver.oneConnection })
      await shareOneConnection(await connect({ storeTimeoutMs: 5000 }, address))
    })

    test('a limit for the time of a statement', async () => {
      const locks = await connect({ storeTimeoutMs: STORE_TIMEOUT_MS }, await userWith(driver.shortStatements))
      await withQuery(async (run) => {
        await run(driver.lockTables)
        for (const names of ['one', ['two', 'names']]) {
          const attempt = () => rejects(locks.acquire(names, { waitMs: 0 }), 'LOCK_STORE', { retryable: true })
          let error = await attempt()
          // On a machine that stands still a call may end before the server reports the limit.
          for (let repeats = 0; repeats < 4 && !driver.errors.statementTimeout.test(error.message); repeats++)
            error = await attempt()
          assert.match(error.message, driver.errors.statementTimeout)
        }
        await run(driver.unlockTables)
      })
      assert.equal(await locks.using(['two', 'names'], (lock) => lock.isHeld), true)
    })

    test('settings for new sessions', async () => {
      for (const { what, begin } of driver.settings) {
        const { url, end: reset } = await begin(server)
        const locks = [await connect({}, url), await connect({}, url)]
        const { counts, end } = load(locks)
        await until(`grants with ${what}`, () => counts.granted > 30, 20_000)
        await end()
        await reset()
      }
    })

    cases({ connect, query, withQuery, test })
  })
}
