// Faults of a MariaDB or MySQL server: those of every SQL server, it has no free connections, and limits of its own.
import assert from 'node:assert/strict'
import { locateMariadb, startMariadb } from '../scripts/mysql.mjs'
import { withMysql } from './mysql-client.mjs'
import { faults, load, shareOneConnection } from './sql-faults.mjs'
import { random } from './stores.mjs'
import { later, rejects, until, waiting } from './tools.mjs'

faults('mysql', {
  locate: locateMariadb,
  start: () => startMariadb(),
  connected: (url, body) => withMysql(url, (client) => body(async (text) => (await client.query(text))[0])),
  lockTables: 'LOCK TABLES locks WRITE, locks_waiters WRITE',
  unlockTables: 'UNLOCK TABLES',
  dropTables: 'DROP TABLE dropped, dropped_waiters',
  waitingStatements:
    "SELECT id FROM information_schema.processlist WHERE command = 'Query' AND state LIKE 'Waiting for table%'",
  async terminate(run) {
    const others = "SELECT id FROM information_schema.processlist WHERE user = 'holdfast' AND id <> CONNECTION_ID()"
    // It may have ended.
    for (const { id } of await run(others)) await run(`KILL ${id}`).catch(() => {})
  },
  cases({ connect, query, withQuery, test, url }) {
    /** Adds a user with limits. Resolves to its URL. */
    async function userWith(limits) {
      const user = `u${random()}`
      await query(`CREATE USER ${user} WITH ${limits}`)
      await query(`GRANT SELECT, INSERT, UPDATE, DELETE ON holdfast.* TO ${user}`)
      return url().replace('holdfast@', `${user}@`)
    }

    test('no free connection: connect rejects with a retryable error, and calls use the open connection', async () => {
      const address = await userWith('MAX_USER_CONNECTIONS 2')
      const locks = await connect({}, address)
      assert.equal(await locks.using('one', (lock) => lock.isHeld), true)
      await withMysql(address, async () => {
        const error = await rejects(connect({}, address), 'LOCK_STORE', { retryable: true })
        assert.match(error.message, /\[1226\]/)
        assert.equal(await locks.using(['two', 'names'], (lock) => lock.isHeld), true, 'the first connection works')
        assert.equal(await locks.using('one', (lock) => lock.isHeld), true, 'the first connection works')
      })
      const another = await until('another connection', () => connect({}, address).catch(() => null))
      assert.equal(await another.using('one', (lock) => lock.isHeld), true)
    })

    test('a user that may open one connection: concurrent calls succeed', async () => {
      await shareOneConnection(await connect({ storeTimeoutMs: 5000 }, await userWith('MAX_USER_CONNECTIONS 1')))
    })

    test('max_connections of the server: connect rejects with a retryable error, and calls use the open connection', async () => {
      const address = await userWith('MAX_USER_CONNECTIONS 0')
      const locks = await connect({}, address)
      assert.equal(await locks.using('one', (lock) => lock.isHeld), true)
      const { createConnection } = /** @type {any} */ (await import('mysql2/promise')).default
      const clients = []
      // A user with all rights may open one more.
      await query('SET GLOBAL max_connections = 20')
      try {
        for (let isFull = false; !isFull;) {
          await createConnection(address).then(
            (client) => clients.push(client),
            () => (isFull = true),
          )
        }
        const error = await rejects(connect({}, address), 'LOCK_STORE', { retryable: true })
        assert.match(error.message, /Too many connections \[1040\]/)
        assert.equal(await locks.using(['two', 'names'], (lock) => lock.isHeld), true, 'the first connection works')
        assert.equal(await locks.using('one', (lock) => lock.isHeld), true, 'the first connection works')
      } finally {
        await Promise.all(clients.map((client) => client.end()))
        await query('SET GLOBAL max_connections = 300')
      }
      const another = await until('another connection', () => connect({}, address).catch(() => null))
      assert.equal(await another.using('one', (lock) => lock.isHeld), true)
    })

    test('rows that another program has locked: calls reject in time, and a deadlock with it is repeated', async () => {
      const locks = await connect()
      const names = ['n0', 'n1']
      assert.equal(await locks.using(names, (lock) => lock.isHeld), true)
      const status = async (name) => Number((await query(`SHOW GLOBAL STATUS LIKE '${name}'`))[0].Value)
      const rowWaits = () => status('Innodb_row_lock_current_waits')
      await withQuery(async (run) => {
        await run("BEGIN; SELECT 1 FROM locks WHERE name = 'n1' FOR UPDATE")
        for (const call of [locks.tryAcquire('n1'), locks.tryAcquire(names)].map(later)) {
          const error = await rejects(call, 'LOCK_STORE', { retryable: true })
          assert.match(error.message, /Lock wait timeout exceeded|no answer within/)
        }
        // The service retries the releases of the attempts while the row is locked: at most two statements wait at the same time.
        assert.ok((await rowWaits()) <= 2)
        await run('ROLLBACK')
        await until('no statement waits', async () => (await rowWaits()) === 0)
        await run('CREATE TABLE heavy (id int PRIMARY KEY) ENGINE = InnoDB')
        const patient = await connect({ storeTimeoutMs: 20_000 })
        let deadlocks = 0
        await withQuery(async (watch) => {
          const read = async (name) => Number((await watch(`SHOW GLOBAL STATUS LIKE '${name}'`))[0].Value)
          const before = await read('Innodb_deadlocks')
          // A call waits for 1 s at most: a slow machine may miss it.
          for (let round = 0; round < 10 && deadlocks === 0; round++) {
            // The server ends the transaction that has changed less: the call, or a release that the engine retries, or both.
            await run(
              "BEGIN; INSERT INTO heavy SELECT seq FROM seq_1_to_500; SELECT 1 FROM locks WHERE name = 'n1' FOR UPDATE",
            )
            const call = later(patient.acquire(names))
            for (const end = performance.now() + 2000; performance.now() < end;) {
              if (await read('Innodb_row_lock_current_waits')) break
            }
            await run("SELECT 1 FROM locks WHERE name = 'n0' FOR UPDATE")
            deadlocks = (await read('Innodb_deadlocks')) - before
            await run('ROLLBACK')
            assert.equal(await (await call).release(), true)
          }
        })
        assert.ok(deadlocks > 0)
        await run('DROP TABLE heavy')
      })
    })

    test('a backup that locks the server for writes: reads go on, calls reject in time', async () => {
      const locks = await connect()
      const held = await locks.acquire('held', { ttlMs: 20_000 })
      await withQuery(async (run) => {
        await run('FLUSH TABLES WITH READ LOCK')
        for (const call of [locks.tryAcquire('one'), locks.acquire(['two', 'names'])].map(later)) {
          const error = await rejects(call, 'LOCK_STORE', { retryable: true })
          assert.match(error.message, /no answer within/)
        }
        assert.equal((await locks.inspect('held'))?.fencingToken, held.fencingToken)
        await run('UNLOCK TABLES')
      })
      assert.equal(await locks.using(['two', 'names'], (lock) => lock.isHeld), true)
      assert.equal(await held.release(), true)
    })

    test('MAX_STATEMENT_TIME of the user', async () => {
      const locks = await connect({}, await userWith('MAX_STATEMENT_TIME 0.2'))
      await withQuery(async (run) => {
        await run('LOCK TABLES locks WRITE')
        for (const names of ['one', ['two', 'names']]) {
          const error = await rejects(locks.acquire(names, { waitMs: 0 }), 'LOCK_STORE', { retryable: true })
          // The calls are repeated alone, without a wait.
          assert.match(error.message, /\[(1969|1205)\]/)
        }
        await run('UNLOCK TABLES')
      })
      assert.equal(await locks.using(['two', 'names'], (lock) => lock.isHeld), true)
    })

    test('settings of the server for new sessions', async () => {
      const settings = {
        wait_timeout: 1,
        idle_transaction_timeout: 1,
        innodb_lock_wait_timeout: 1,
        autocommit: 0,
        sql_mode: "'ANSI,NO_BACKSLASH_ESCAPES,TRADITIONAL'",
        tx_isolation: "'SERIALIZABLE'",
        time_zone: "'+05:30'",
        // A row that is not in an answer would count as free.
        sql_select_limit: 1,
        completion_type: "'RELEASE'",
      }
      for (const [name, value] of Object.entries(settings)) {
        const [{ before }] = await query(`SELECT CAST(@@GLOBAL.${name} AS CHAR) AS \`before\``)
        await query(`SET GLOBAL ${name} = ${value}`)
        const locks = [await connect(), await connect()]
        const { counts, end } = load(locks)
        await until(`grants with ${name} = ${value}`, () => counts.granted > 30, 20_000)
        await end()
        await query(`SET GLOBAL ${name} = ${/^\d+$/.test(before) ? before : `'${before}'`}`)
      }
    })

    test('sql_safe_updates of the server: waiters keep their positions', async () => {
      await query('SET GLOBAL sql_safe_updates = 1')
      const locks = await connect()
      const held = await locks.acquire('held')
      const waiter = later(locks.acquire('held', { waitMs: 60_000 }))
      await waiting(locks, 1)
      const entered = 'SELECT CAST(MAX(alive_until) AS CHAR) AS at FROM locks_waiters'
      const [{ at }] = await query(entered)
      await until('a heartbeat', async () => (await query(entered))[0].at > at, 20_000)
      await query('SET GLOBAL sql_safe_updates = 0')
      await held.release()
      await (await waiter).release()
    })
  },
})
