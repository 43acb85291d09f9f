// What waits for the disk and for standbys on PostgreSQL: grants, not releases.
import assert from 'node:assert/strict'
import { it } from 'node:test'
import { startPostgres } from '../scripts/postgres.mjs'
import { LockService } from '../index.js'
import { withPostgres } from './postgres-client.mjs'
import { skip } from './stores.mjs'
import { sleep, until } from './tools.mjs'

it('PostgreSQL: a grant waits for them, and a release does not', async (t) => {
  const server = await startPostgres().catch((/** @type {Error} */ error) => error)
  if (server instanceof Error) return skip(t, `no postgres: ${server.message}`)
  try {
    const url = `postgres://holdfast@127.0.0.1:${server.port}/postgres`
    const locks = await LockService.connect(url, { storeTimeoutMs: 20_000 })
    const held = await Promise.all(['a', 'b', 'c'].map((name) => locks.acquire(name, { ttlMs: 60_000 })))
    // A commit then waits for a standby that does not exist.
    const standbys = (/** @type {string} */ names) =>
      withPostgres(url, async (client) => {
        await client.query(`ALTER SYSTEM SET synchronous_standby_names = '${names}'`)
        await client.query('SELECT pg_reload_conf()')
        await until('the setting', async () => {
          const { rows } = await client.query('SHOW synchronous_standby_names')
          return rows[0].synchronous_standby_names === names
        })
      })
    await standbys('nobody')
    await sleep(100)
    // One alone, and two that share a statement.
    assert.equal(await held[0].release(), true)
    assert.deepEqual(await Promise.all([held[1].release(), held[2].release()]), [true, true])
    let isGranted = false
    const call = locks.acquire('a', { ttlMs: 60_000 }).then((lock) => {
      isGranted = true
      return lock
    })
    await sleep(500)
    assert.equal(isGranted, false)
    // Aborted calls have their statements cancelled. The server then commits without the standby.
    for (const name of ['d', 'e']) {
      await assert.rejects(locks.acquire(name, { signal: AbortSignal.timeout(200) }))
    }
    await sleep(500)
    assert.equal(isGranted, false, 'no standby has it')
    // As an operator would.
    await withPostgres(url, async (client) => {
      const cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
      await until('a cancelled statement', async () => (await client.query(cancel)).rows.length > 0)
    })
    await sleep(500)
    assert.equal(isGranted, false, 'no standby has it')
    await standbys('')
    const lock = await call
    assert.ok(lock.fencingToken > held[0].fencingToken)
    assert.equal(await lock.release(), true)
    await locks.close()
  } finally {
    await server.stop()
  }
})
