// Makes many calls at once, measures the memory of this process, and reports how the calls ended.
import { setTimeout as sleep } from 'node:timers/promises'
import { Standstill } from '../soak/checks.mjs'
import { open, requests, report, task } from './child.mjs'

const RENEWED_TTL_MS = 6000
const FREED_MS = 5000
const standstill = new Standstill()

async function rss() {
  for (let turn = 0; turn < 3; turn++) {
    globalThis.gc()
    await sleep(20)
  }
  return process.memoryUsage.rss()
}

/** Makes `count` calls in one tick; each granted lock is released at once if `isShared`, else after all have ended. */
async function calls(count, isShared, call) {
  const failed = {}
  let [granted, slowestMs] = [0, 0]
  const one = async (index) => {
    const [startedAt, stoodStill] = [performance.now(), standstill.totalMs]
    const ended = () => {
      // The time in which the event loop was blocked is not a wait for the store.
      slowestMs = Math.max(slowestMs, performance.now() - startedAt - (standstill.totalMs - stoodStill))
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
  let locks = await Promise.all(Array.from({ length: count }, (_, index) => one(index)))
  const releases = await Promise.allSettled(locks.map((lock) => lock?.release()))
  locks = undefined
  const releasesFailed = releases.filter(({ status }) => status === 'rejected').length
  return { granted, failed, slowestMs: Math.round(slowestMs), releasesFailed }
}

const locks = await open({ storeTimeoutMs: task.storeTimeoutMs })
const held = await locks.acquire(`held:${process.pid}`, { ttlMs: RENEWED_TTL_MS })
const ways = {
  free: (index) => locks.tryAcquire(`free:${process.pid}:${index}`, { ttlMs: 60_000 }),
  waiters: () => locks.acquire('crowd', { ttlMs: 60_000, waitMs: task.waitMs }),
}
const isShared = task.way === 'waiters'
// The first calls allocate what stays: that is not growth.
await calls(200, isShared, ways[task.way])
const before = await rss()
report({ ready: true })
for await (const _ of requests()) {
  const result = await calls(task.count, isShared, ways[task.way])
  // The memory of calls that have ended is freed soon.
  let keptBytes
  for (const end = performance.now() + FREED_MS; ; await sleep(200)) {
    keptBytes = (await rss()) - before
    if (keptBytes <= task.maxKeptBytes || performance.now() > end) break
  }
  report({ result: { ...result, keptBytes, isHeld: held.isHeld } })
  break
}
await locks.close()
report({ closed: true })
