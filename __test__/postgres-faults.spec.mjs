// Faults of a PostgreSQL server: those of every SQL server, one of its processes is killed, it has no free connections, and limits of its own.
import assert from 'node:assert/strict'
import { locatePostgres, startPostgres } from '../scripts/postgres.mjs'
import { withPostgres } from './postgres-client.mjs'
import { faults, grantAfter, load, shareOneConnection } from './sql-faults.mjs'
import { random } from './stores.mjs'
import { rejects, until } from './tools.mjs'

faults('postgres', {
  locate: locatePostgres,
  start: () => startPostgres({ settings: { max_connections: 40 } }),
  connected: (url, body) => withPostgres(url, (client) => body(async (text) => (await client.query(text)).rows)),
  lockTables: 'BEGIN; LOCK TABLE holdfast.locks, holdfast.locks_waiters',
  unlockTables: 'ROLLBACK',
  dropTables: 'DROP TABLE holdfast.dropped, holdfast.dropped_waiters',
  waitingStatements:
    "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast' AND wait_event_type = 'Lock'",
  terminate: (run) => run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holdfast'"),
  cases({ connect, query, withQuery, test, url }) {
    /** Adds a role with settings of its own. Resolves to its URL. */
    async function roleWith(settings) {
      const role = `r${random()}`
      await query(`CREATE ROLE ${role} LOGIN`)
      await query(`GRANT USAGE ON SCHEMA holdfast TO ${role}`)
      await query(`GRANT ALL ON holdfast.locks, holdfast.locks_waiters TO ${role}`)
      for (const [name, value] of Object.entries(settings)) await query(`ALTER ROLE ${role} SET ${name} = '${value}'`)
      return url().replace('holdfast@', `${role}@`)
    }

    test('a process of the server that is killed: the server ends all connections, and recovers', async () => {
      const locks = [await connect(), await connect()]
      const held = await locks[0].acquire('held', { ttlMs: 30_000 })
      const { counts, end } = load(locks)
      await grantAfter(counts, 0)
      const backends = "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast' LIMIT 1"
      process.kill((await query(backends))[0].pid, 'SIGKILL')
      await grantAfter(counts, performance.now() + 500)
      await end()
      assert.equal(held.isHeld, true)
      assert.equal(await held.release(), true)
    })

    test('no free connection: connect rejects with a retryable error, and calls use the open connection', async () => {
      const address = await roleWith({})
      const locks = await connect({}, address)
      assert.equal(await locks.using('one', (lock) => lock.isHeld), true)
      const clients = []
      const { Client } = /** @type {any} */ (await import('pg')).default
      try {
        for (;;) {
          const client = new Client({ connectionString: address })
          client.on('error', () => {})
          const isFull = await client.connect().then(
            () => false,
            () => true,
          )
          if (isFull) break
          clients.push(client)
        }
        const error = await rejects(connect({}, address), 'LOCK_STORE', { retryable: true })
        assert.match(error.message, /\[53300\]/)
        assert.equal(await locks.using(['two', 'names'], (lock) => lock.isHeld), true, 'the first connection works')
        assert.equal(await locks.using('one', (lock) => lock.isHeld), true, 'the first connection works')
      } finally {
        await Promise.all(clients.map((client) => client.end()))
      }
      const another = await until('another connection', () => connect({}, address).catch(() => null))
      assert.equal(await another.using('one', (lock) => lock.isHeld), true)
    })

    test('a role that may open one connection: concurrent calls succeed', async () => {
      const address = await roleWith({})
      await query(`ALTER ROLE ${new URL(address).username} CONNECTION LIMIT 1`)
      await shareOneConnection(await connect({ storeTimeoutMs: 5000 }, address))
    })

    test('statement_timeout of the role', async () => {
      const locks = await connect({}, await roleWith({ statement_timeout: '200ms' }))
      await withQuery(async (run) => {
        await run('BEGIN; LOCK TABLE holdfast.locks')
        for (const names of ['one', ['two', 'names']]) {
          const error = await rejects(locks.acquire(names, { waitMs: 0 }), 'LOCK_STORE', { retryable: true })
          // The calls are repeated alone, with a short wait.
          assert.match(error.message, /\[(57014|55P03)\]/)
        }
        await run('ROLLBACK')
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
        const address = await roleWith(one)
        const locks = [await connect({}, address), await connect({}, address)]
        const { counts, end } = load(locks)
        await until(`grants with ${JSON.stringify(one)}`, () => counts.granted > 30, 20_000)
        await end()
      }
    })
  },
})
