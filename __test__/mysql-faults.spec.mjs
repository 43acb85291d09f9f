// Faults of a MariaDB or MySQL server: those of every SQL server, rows and tables that are locked, and a setting of its own.
import assert from 'node:assert/strict'
import { mysql } from './drivers/mysql.mjs'
import { sqlFaults } from './suites/sql-faults.mjs'
import { later, rejects, until, waiting } from './tools.mjs'

sqlFaults(mysql, ({ connect, query, withQuery, test }) => {
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
      // The engine retries the releases of the attempts while the row is locked: at most two statements wait at the same time.
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
})
