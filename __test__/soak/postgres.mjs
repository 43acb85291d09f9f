// Long cases on PostgreSQL for `npm run soak`: a full disk, and statements that no caller awaits any more.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { mkdtempSync, rmSync, statfsSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { LockService } from '../../index.js'
import { startPostgres } from '../../scripts/postgres.mjs'
import { withPostgres } from '../postgres-client.mjs'
import { rejection, sleep, until } from '../tools.mjs'

const DISK_BYTES = 160 * 2 ** 20

/** Mounts a small disk in memory. `undefined`: this process may not. */
function mountDisk() {
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-disk-'))
  try {
    execFileSync('mount', ['-t', 'tmpfs', '-o', `size=${DISK_BYTES},mode=755`, 'tmpfs', folder], { stdio: 'ignore' })
    return folder
  } catch {
    rmSync(folder, { recursive: true })
    return undefined
  }
}

/** The disk is full: calls are granted or reject with a retryable error, and are granted again when there is room. */
export async function diskFull() {
  const disk = mountDisk()
  if (!disk) return 'left out: this process may not mount a disk'
  const { HOLDFAST_SERVERS_DIR } = process.env
  process.env.HOLDFAST_SERVERS_DIR = disk
  const server = await startPostgres({ settings: { min_wal_size: "'32MB'", max_wal_size: "'32MB'" } }).finally(() => {
    if (HOLDFAST_SERVERS_DIR === undefined) delete process.env.HOLDFAST_SERVERS_DIR
    else process.env.HOLDFAST_SERVERS_DIR = HOLDFAST_SERVERS_DIR
  })
  const locks = await LockService.connect(server.url, { storeTimeoutMs: 3000 })
  const filler = join(disk, 'filler')
  try {
    const { bavail, bsize } = statfsSync(disk)
    writeFileSync(filler, Buffer.alloc(Math.max(0, bavail * bsize - 2 ** 20)))
    const counts = { granted: 0, failed: 0 }
    const metadata = 'x'.repeat(4000)
    for (let call = 0; counts.failed < 5 && call < 50_000; call += 50) {
      const calls = Array.from({ length: 50 }, (_, i) =>
        locks.tryAcquire(`n${call + i}`, { metadata, ttlMs: 1000, renew: false }),
      )
      for (const outcome of await Promise.allSettled(calls)) {
        const reason = outcome.status === 'rejected' ? outcome.reason : undefined
        counts[reason ? 'failed' : 'granted']++
        if (reason) assert.deepEqual([reason.code, reason.retryable], ['LOCK_STORE', true], reason.message)
      }
    }
    assert.ok(counts.failed > 0, 'the disk is full')
    rmSync(filler)
    // A server that found no room for its log has ended.
    await withPostgres(server.url, (client) => client.query('SELECT 1')).catch(() => server.restart())
    await until('calls are granted again', () => locks.tryAcquire('after').catch(() => null), 30_000)
    return counts
  } finally {
    await locks.close()
    await server.stop()
    execFileSync('umount', ['-l', disk])
    rmSync(disk, { recursive: true })
  }
}

/** Statements that wait for a locked table for minutes do not pile up on the server, and end with the service. */
export async function lockedTable() {
  const server = await startPostgres()
  try {
    const locks = await LockService.connect(server.url, { storeTimeoutMs: 1000 })
    const most = { connections: 0 }
    await withPostgres(server.url, async (client) => {
      await client.query('BEGIN; LOCK TABLE locks, locks_waiters')
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
