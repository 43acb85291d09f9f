// Bursts on SQLite, in a temporary folder, and a full disk. Each exported case resolves to its figures, and rejects when a guarantee is broken.
// `npm run soak` runs all of them, sqlite-burst.spec.mjs a small one.
import assert from 'node:assert/strict'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { LockService } from '../../index.js'
import { sleep } from '../tools.mjs'
import { onFullDisk } from './disk.mjs'

const STORE_TIMEOUT_MS = 5000
/** The guarantee is one second. The rest is slack for the event loop, and for a machine that stalls for a moment. */
const SLACK_MS = 4000

const rss = () => {
  globalThis.gc?.()
  return process.memoryUsage.rss()
}

/** Many free names at once: each call is granted or rejects in time and leaves nothing, and a renewed lease survives. */
export async function burst(count = 5000) {
  const folder = mkdtempSync(join(process.env.HOLDFAST_SERVERS_DIR || tmpdir(), 'holdfast-burst-'))
  const target = `sqlite:${join(folder, 'locks.sqlite')}`
  const locks = await LockService.connect(target, { storeTimeoutMs: STORE_TIMEOUT_MS })
  const witness = await LockService.connect(target)
  try {
    const kept = await locks.acquire('kept', { ttlMs: 6000 })
    const before = rss()
    let slowest = 0
    const calls = Array.from({ length: count }, (_, i) => {
      const startedAt = performance.now()
      const done = () => (slowest = Math.max(slowest, performance.now() - startedAt))
      return locks.tryAcquire(`free ${i}`, { ttlMs: 60_000 }).finally(done)
    })
    const peak = rss()
    const results = await Promise.allSettled(calls)
    const granted = results.filter((result) => result.status === 'fulfilled' && result.value).length
    for (const { reason } of results.filter((result) => result.status === 'rejected')) {
      assert.equal(reason.code, 'LOCK_STORE', reason.message)
      assert.equal(reason.retryable, true)
    }
    assert.ok(slowest <= STORE_TIMEOUT_MS + SLACK_MS, `the slowest call took ${Math.round(slowest)} ms`)
    await sleep(1000)
    const left = (await witness.list({ prefix: 'free' })).length
    assert.equal(left, granted, 'only what was granted is held')
    assert.equal(kept.isHeld, true, 'the renewed lease was lost')
    assert.equal((await witness.inspect('kept'))?.fencingToken, kept.fencingToken)
    await locks.close()
    assert.deepEqual(await witness.list(), [], 'close() left locks behind')
    await sleep(4000)
    return {
      count,
      granted,
      slowestMs: Math.round(slowest),
      bytesPerCall: Math.round((peak - before) / count),
      bytesPerCallKept: Math.round((rss() - before) / count),
    }
  } finally {
    await Promise.all([locks.close(), witness.close()])
    rmSync(folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 })
  }
}

/** The disk is full: calls are granted or reject with a retryable error, and are granted again when there is room. */
export const diskFull = () =>
  onFullDisk({
    bytes: 16 * 2 ** 20,
    start: async () => ({
      url: `sqlite:${join(String(process.env.HOLDFAST_SERVERS_DIR), 'locks.sqlite')}`,
      stop: async () => {},
      restart: async () => {},
    }),
    isUp: async () => {},
  })

/** 20 000 free names at once. */
export const burst20k = () => burst(20_000)
/** 100 000 free names at once. */
export const burst100k = () => burst(100_000)
