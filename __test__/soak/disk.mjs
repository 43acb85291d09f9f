// A server on a full disk, for `npm run soak`.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { mkdtempSync, rmSync, statfsSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { LockService } from '../../index.js'
import { until } from '../tools.mjs'
import { LeftOut } from './checks.mjs'

/** Mounts a small disk in memory. `undefined`: this process may not. */
function mountDisk(bytes) {
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-disk-'))
  try {
    execFileSync('mount', ['-t', 'tmpfs', '-o', `size=${bytes},mode=755`, 'tmpfs', folder], { stdio: 'ignore' })
    return folder
  } catch {
    rmSync(folder, { recursive: true })
    return undefined
  }
}

/**
 * Starts a server on a small disk, and fills the disk: calls are granted or reject with a retryable error, and are granted again
 * when there is room. `isUp` rejects when the server has ended. Rejects with `LeftOut` if this process may not mount a disk.
 */
export async function onFullDisk({ bytes, start, isUp }) {
  const disk = mountDisk(bytes)
  if (!disk) throw new LeftOut('this process may not mount a disk')
  const { HOLDFAST_SERVERS_DIR } = process.env
  process.env.HOLDFAST_SERVERS_DIR = disk
  const server = await start().finally(() => {
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
    await isUp(server).catch(() => server.restart())
    await until('calls are granted again', () => locks.tryAcquire('after').catch(() => null), 30_000)
    return counts
  } finally {
    await locks.close()
    await server.stop()
    execFileSync('umount', ['-l', disk])
    rmSync(disk, { recursive: true })
  }
}
