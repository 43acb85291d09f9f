// Long cases on PostgreSQL for `npm run soak`: a full disk, and statements that no caller awaits any more.
import assert from 'node:assert/strict'
import { LockService } from '../../index.js'
import { startPostgres } from '../../scripts/postgres.mjs'
import { withPostgres } from '../postgres-client.mjs'
import { rejection, sleep } from '../tools.mjs'
import { onFullDisk } from './disk.mjs'

/** The disk is full: calls are granted or reject with a retryable error, and are granted again when there is room. */
export const diskFull = () =>
  onFullDisk({
    bytes: 160 * 2 ** 20,
    start: () => startPostgres({ settings: { min_wal_size: "'32MB'", max_wal_size: "'32MB'" } }),
    isUp: ({ url }) => withPostgres(url, (client) => client.query('SELECT 1')),
  })

/** Statements that wait for a locked table for minutes do not pile up on the server, and end with the service. */
export async function lockedTable() {
  const server = await startPostgres()
  try {
    const locks = await LockService.connect(server.url, { storeTimeoutMs: 1000 })
    const most = { connections: 0 }
    await withPostgres(server.url, async (client) => {
      await client.query('BEGIN; LOCK TABLE holdfast.locks, holdfast.locks_waiters')
      for (const end = Date.now() + 60_000; Date.now() < end;) {
        const calls = [
          locks.tryAcquire('one'),
          locks.acquire(['two', 'names']),
          locks.acquire('three', { waitMs: 2000 }),
        ]
        for (const error of await Promise.all(calls.map(rejection)))
          assert.equal(error.code, 'LOCK_STORE', error.message)
        const text = "SELECT count(*)::int AS count FROM pg_stat_activity WHERE application_name = 'holdfast'"
        most.connections = Math.max(most.connections, (await client.query(text)).rows[0].count)
      }
      await client.query('ROLLBACK')
    })
    assert.ok(most.connections <= 6, `${most.connections} connections`)
    assert.equal(await locks.using('one', (lock) => lock.isHeld), true)
    await locks.close()
    await sleep(500)
    const text = "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast'"
    assert.equal((await withPostgres(server.url, (client) => client.query(text))).rows.length, 0)
    return most
  } finally {
    await server.stop()
  }
}
