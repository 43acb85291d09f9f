// Faults of a PostgreSQL server: it stalls, is killed under load, ends connections, has no free ones, and limits of its own.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { locatePostgres, startPostgres } from '../scripts/postgres.mjs'
import { LockService } from '../index.js'
import { withPostgres } from './postgres-client.mjs'
import { SLACK_MS } from './proxy.mjs'
import { canStartServer, random } from './stores.mjs'
import { later, rejects, rejection, sleep, until, waiting } from './tools.mjs'

const STORE_TIMEOUT_MS = 1500

describe('postgres: faults of the server', { concurrency: 1 }, () => {
  /** @type {Awaited<ReturnType<typeof startPostgres>>} */
  let server
  let isUnable = true
  const services = []
  const connect = async (options, url = server.url) => {
    const service = await LockService.connect(url, { storeTimeoutMs: STORE_TIMEOUT_MS, ...options })
    services.push(service)
    return service
  }
  const closeAll = () => Promise.all(services.splice(0).map((service) => service.close()))
  const query = (text, url = server.url) => withPostgres(url, async (client) => (await client.query(text)).rows)

  const skipped = []
  before(async () => {
    if (!(await canStartServer({ skip: (reason) => skipped.push(reason) }, 'postgres', locatePostgres))) return
    server = await startPostgres({ settings: { max_connections: 40 } })
    // Creates the tables, for roles without that right.
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

  /** Adds a role with settings of its own. Resolves to its URL. */
  async function roleWith(settings) {
    const role = `r${random()}`
    await query(`CREATE ROLE ${role} LOGIN`)
    await query(`GRANT ALL ON locks, locks_waiters TO ${role}`)
    for (const [name, value] of Object.entries(settings)) await query(`ALTER ROLE ${role} SET ${name} = '${value}'`)
    return server.url.replace('holdfast@', `${role}@`)
  }

  /** Makes pairs of calls on few names until `end()`, and checks that no two callers hold a name, and that its tokens grow. */
  function load(locks, { names = 3, callers = 12 } = {}) {
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
  const grantAfter = async (counts, at) => {
    await until('a grant after the fault', () => counts.last > at, 20_000)
    return counts.last - at
  }

  test('a stall of the server: calls reject in time, leases outlast it', async () => {
    const locks = await connect()
    const held = await locks.acquire('held', { ttlMs: 20_000 })
    const waiter = later(locks.acquire('held', { waitMs: 60_000, onStoreError: 'wait' }))
    await waiting(locks, 1)
    await server.pause()
    try {
      const startedAt = performance.now()
      const calls = Array.from({ length: 200 }, (_, i) =>
        rejects(locks.tryAcquire(`free:${i}`, { ttlMs: 30_000 }), 'LOCK_STORE', { retryable: true }),
      )
      await Promise.all([...calls, rejects(locks.inspect('held'), 'LOCK_STORE', { retryable: true })])
      const tookMs = performance.now() - startedAt
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

  test('a table that is locked by another program: the same', async () => {
    const locks = await connect()
    const held = await locks.acquire('held', { ttlMs: 20_000 })
    await withPostgres(server.url, async (client) => {
      await client.query('BEGIN; LOCK TABLE locks, locks_waiters')
      const calls = [locks.tryAcquire('free'), locks.acquire(['two', 'names']), locks.acquire('held', { waitMs: 500 })]
      for (const error of await Promise.all(calls.map(rejection))) {
        assert.equal(error.code, 'LOCK_STORE', error.message)
        assert.equal(error.retryable, true)
      }
      const waitingStatements = () =>
        query("SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast' AND wait_event_type = 'Lock'")
      // A renewal may be waiting.
      await until('few statements wait', async () => (await waitingStatements()).length <= 2)
      await client.query('ROLLBACK')
    })
    assert.equal(await locks.using('free', (lock) => lock.isHeld), true)
    assert.equal(held.isHeld, true)
    assert.equal(await held.release(), true)
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
    // One process of the server is killed: the server ends all connections, and recovers.
    const backends = "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast' LIMIT 1"
    process.kill((await query(backends))[0].pid, 'SIGKILL')
    await grantAfter(counts, performance.now() + 500)
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
      await query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holdfast'")
      await sleep(150)
    }
    await grantAfter(counts, performance.now())
    await end()
    assert.equal(held.isHeld, true)
    assert.equal(await held.release(), true)
    assert.equal(locks[0].stats().lost, 0)
  })

  test('no free connection: retryable errors, and calls again when there is one', async () => {
    const url = await roleWith({})
    const locks = await connect({}, url)
    // A connection for single statements: several names need a second one.
    assert.equal(await locks.using('one', (lock) => lock.isHeld), true)
    const clients = []
    const { Client } = /** @type {any} */ (await import('pg')).default
    try {
      for (;;) {
        const client = new Client({ connectionString: url })
        client.on('error', () => {})
        const isFull = await client.connect().then(
          () => false,
          () => true,
        )
        if (isFull) break
        clients.push(client)
      }
      const error = await rejects(connect({}, url), 'LOCK_STORE', { retryable: true })
      assert.match(error.message, /\[53300\]/)
      await rejects(locks.acquire(['two', 'names'], { waitMs: 300 }), 'LOCK_STORE', { retryable: true })
      assert.equal(await locks.using('one', (lock) => lock.isHeld), true, 'the first connection works')
    } finally {
      await Promise.all(clients.map((client) => client.end()))
    }
    const both = await until('a second connection', () => locks.acquire(['two', 'names']).catch(() => null))
    assert.equal(await both.release(), true)
  })

  test('statement_timeout of the role', async () => {
    const locks = await connect({}, await roleWith({ statement_timeout: '200ms' }))
    await withPostgres(server.url, async (client) => {
      await client.query('BEGIN; LOCK TABLE locks')
      for (const names of ['one', ['two', 'names']]) {
        const error = await rejects(locks.acquire(names, { waitMs: 0 }), 'LOCK_STORE', { retryable: true })
        assert.match(error.message, /\[57014\]/)
      }
      await client.query('ROLLBACK')
    })
    assert.equal(await locks.using(['two', 'names'], (lock) => lock.isHeld), true)
  })

  test('idle_in_transaction_session_timeout, lock_timeout and serializable transactions of the role', async () => {
    const settings = [
      { idle_in_transaction_session_timeout: '1ms' },
      { lock_timeout: '1ms' },
      { default_transaction_isolation: 'serializable' },
      { default_transaction_isolation: 'repeatable read', default_transaction_deferrable: 'on' },
    ]
    for (const one of settings) {
      const url = await roleWith(one)
      const locks = [await connect({}, url), await connect({}, url)]
      const { counts, end } = load(locks)
      await until(`grants with ${JSON.stringify(one)}`, () => counts.granted > 30, 20_000)
      await end()
    }
  })
})
