// The contract on PostgreSQL behind PgBouncer in transaction mode, and what a pooler does to other programs and refuses.
import assert from 'node:assert/strict'
import { describe, it } from 'node:test'
import { locatePgBouncer, startPgBouncer } from '../scripts/postgres.mjs'
import { LockService } from '../index.js'
import { contract } from './contract.mjs'
import { withPostgres } from './postgres-client.mjs'
import { canStartServer, random } from './stores.mjs'
import { rejects, sleep, until } from './tools.mjs'

contract('postgres-pooler')
contract('postgres-pooler-declared')

describe('postgres: a pooler of its own', { concurrency: 1 }, () => {
  const test = (name, settings, body) =>
    it(name, { timeout: 90_000 }, async (t) => {
      if (!(await canStartServer(t, 'postgres', locatePgBouncer))) return
      const pooler = await startPgBouncer(settings)
      try {
        await body(pooler)
      } finally {
        await pooler.stop()
      }
    })

  // PgBouncer 1.18 and 1.19 end when the connection of a cancel request is closed before they close it.
  test('cancelled statements do not end the pooler', {}, async (pooler) => {
    const locks = await LockService.connect(`${pooler.url}?pooler=transaction`)
    await withPostgres(pooler.url, async (other) => {
      /** @type {Error[]} */
      const errors = []
      other.on('error', (error) => errors.push(error))
      const rounds = [1, 2, 1, 2, 1, 2].map((times) =>
        times === 1 ? { ttlMs: 600, lockMs: 500, times } : { ttlMs: 2000, lockMs: 900, times },
      )
      for (const { ttlMs, lockMs, times } of rounds) {
        const held = await locks.acquire(`held:${random()}`, { ttlMs })
        for (let time = 0; time < times; time++) {
          await withPostgres(pooler.server.url, async (client) => {
            await client.query('BEGIN; LOCK TABLE locks, locks_waiters')
            await sleep(lockMs)
            await client.query('ROLLBACK')
          })
          await sleep(100)
        }
        await sleep(500)
        await held.release().catch(() => {})
        assert.deepEqual(errors, [], 'the connection of another program')
        assert.equal((await other.query('SELECT 1 AS one')).rows[0].one, 1)
      }
      const after = await until('a lock', () => locks.acquire('after').catch(() => null))
      assert.equal(await after.release(), true)
    })
    await locks.close()
  })

  // The pooler accepts further logins, and their statements get no answer.
  test('a pool of two sessions serves all calls', { default_pool_size: 2 }, async (pooler) => {
    const sessions = `${pooler.url.replace(/\/postgres$/, '/sessions')}?pooler=none`
    const locks = await LockService.connect(sessions, { storeTimeoutMs: 2500 })
    const leases = await Promise.all([0, 1, 2].map((number) => locks.acquire(`held:${number}`, { ttlMs: 4000 })))
    // Longer than three times the store timeout, and than two leases.
    const end = performance.now() + 9000
    const callers = ['a', 'b', 'c', ['d', 'e']].map(async (names) => {
      while (performance.now() < end) {
        const lock = await locks.acquire(names, { waitMs: 5000 })
        await locks.inspect('held:0')
        assert.equal(await lock.release(), true)
        await sleep(50)
      }
    })
    await Promise.all(callers)
    assert.deepEqual(await Promise.all(leases.map((lease) => lease.release())), [true, true, true])
    await locks.close()
  })

  test('statement mode is refused', { pool_mode: 'statement' }, async (pooler) => {
    for (const query of ['', '?pooler=transaction']) {
      const error = await rejects(LockService.connect(pooler.url + query), 'LOCK_STORE', { retryable: false })
      assert.match(error.message, /statement pooling mode.*pool_mode = transaction/)
    }
  })
})
