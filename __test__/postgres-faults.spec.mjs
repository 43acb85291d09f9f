// Faults of a PostgreSQL server: those of every SQL server, and one of its processes is killed.
import assert from 'node:assert/strict'
import { postgres } from './drivers/postgres.mjs'
import { grantAfter, load, sqlFaults } from './suites/sql-faults.mjs'

sqlFaults(postgres, ({ connect, query, test }) => {
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
})
