// Makes many calls at once, measures the memory of this process, and reports how the calls ended.
import { setTimeout as sleep } from 'node:timers/promises'
import { stopwatch } from '../tools.mjs'
import { open, requests, report, task } from './child.mjs'

const RENEWED_TTL_MS = 6000
const RECLAIM_MS = 5000

// `start` runs this with `--expose-gc`.
const collectGarbage = /** @type {NodeJS.GCFunction} */ (globalThis.gc)

async function rss() {
  for (let round = 0; round < 3; round++) {
    collectGarbage()
    await sleep(20)
  }
  return process.memoryUsage.rss()
}

/** Makes `count` calls in one tick; each granted lock is released at once if `isShared`, else after all have ended. */
async function calls(count, isShared, call) {
  /** @type {Record<string, number>} */
  const failed = {}
  let [granted, slowestMs] = [0, 0]
  const one = async (index) => {
    const elapsedMs = stopwatch()
    const ended = () => {
      // The time in which the event loop was blocked is not a wait for the store.
      slowestMs = Math.max(slowestMs, elapsedMs())
    }
    try {
      const lock = await call(index)
      ended()
      granted++
      if (!isShared) return lock
      await lock.release()
    } catch (error) {
      ended()
      failed[error.code] = (failed[error.code] ?? 0) + 1
    }
  }
  // No variable keeps the locks: the memory is measured afterwards.
  const releases = await Promise.all(Array.from({ length: count }, (_, index) => one(index))).then((locks) =>
    Promise.allSettled(locks.map((lock) => lock?.release())),
  )
  const releasesFailed = releases.filter(({ status }) => status === 'rejected').length
  return { granted, failed, slowestMs, releasesFailed }
}

const locks = await open({ storeTimeoutMs: task.storeTimeoutMs })
const held = await locks.acquire(`held:${process.pid}`, { ttlMs: RENEWED_TTL_MS })
const scenarios = {
  free: (index) => locks.tryAcquire(`free:${process.pid}:${index}`, { ttlMs: 60_000 }),
  waiters: () => locks.acquire('shared', { ttlMs: 60_000, waitMs: task.waitMs }),
}
const isShared = task.scenario === 'waiters'
// The first calls allocate memory that stays: it does not count as growth.
await calls(200, isShared, scenarios[task.scenario])
const before = await rss()
report({ ready: true })
for await (const _ of requests()) {
  const result = await calls(task.count, isShared, scenarios[task.scenario])
  // The allocator returns the memory of finished calls within seconds.
  let keptBytes
  for (const end = performance.now() + RECLAIM_MS; ; await sleep(200)) {
    keptBytes = (await rss()) - before
    if (keptBytes <= task.maxKeptBytes || performance.now() > end) break
  }
  report({ result: { ...result, keptBytes, isHeld: held.isHeld } })
  break
}
await locks.close()
report({ closed: true })
