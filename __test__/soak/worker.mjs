// One process of the soak. The runner starts it, sends it requests, and may stop or kill it at any time.
import { setTimeout as sleep } from 'node:timers/promises'
import { LockService } from '../../index.js'
import { stopwatch } from '../tools.mjs'

const { target, options, tag } = JSON.parse(process.argv[2])
const STORE_TIMEOUT_MS = 5000
const SHARED_NAMES = ['shared:0', 'shared:1', 'shared:2']
const SHARED_TTL_MS = 5000
const OWN_TTL_MS = 30_000
const PROBE_MS = 200
/** Slack of a call beyond its limit. The guarantee is one second; one more is for a busy machine. */
const SLACK_MS = 2000

// The runner starts this with `--expose-gc`.
const collectGarbage = /** @type {NodeJS.GCFunction} */ (globalThis.gc)
const now = () => Number(process.hrtime.bigint() / 1000n)
const random = (limit) => Math.random() * limit
const send = (message) => new Promise((resolve) => process.send?.(message, resolve))
const violation = (text) => send({ violation: `${tag}: ${text}` })

/** @type {any} */
let service
/** @type {any} */
let held
let isWorking = false
/** @type {Promise<void>[]} */
let loops = []
let serial = 0
let inFlight = 0
/** @type {{ granted: number, failed: Record<string, number> }} */
const counts = { granted: 0, failed: {} }

/** Makes a call. Checks that it ends within its limit, and fails only as it may while a store is unavailable. */
async function bounded(what, limitMs, call) {
  const elapsedMs = stopwatch()
  inFlight++
  try {
    return await call()
  } catch (error) {
    const mayFail =
      error.code === 'LOCK_TIMEOUT' || error.code === 'LOCK_LOST' || (error.code === 'LOCK_STORE' && error.retryable)
    if (!mayFail) violation(`${what} failed with ${error.code}: ${error.message}`)
    counts.failed[error.code] = (counts.failed[error.code] ?? 0) + 1
  } finally {
    inFlight--
    const tookMs = elapsedMs()
    if (tookMs > limitMs + SLACK_MS) violation(`${what} took ${tookMs} ms, and its limit is ${limitMs} ms`)
  }
}

const acquire = (names, waitMs, more) =>
  bounded('acquire', Math.max(waitMs, STORE_TIMEOUT_MS), () =>
    service.acquire(names, { ttlMs: SHARED_TTL_MS, waitMs, ...more }),
  )
const tryAcquire = (names, more) => bounded('tryAcquire', STORE_TIMEOUT_MS, () => service.tryAcquire(names, more))
const release = (lock) => bounded('release', STORE_TIMEOUT_MS, () => lock.release())

// ---- A hold of shared names: reported to the runner, which compares it with all others ------------------------------

const replies = new Map()
const ask = (request) =>
  new Promise((resolve) => {
    const id = ++serial
    replies.set(id, resolve)
    process.send?.({ ...request, id })
  })

/** Reads and writes the guarded resource, and reports the time in which the lease was valid. */
async function hold(lock, ms) {
  const token = String(lock.fencingToken)
  // Read the time before the lease is checked: a process that is stopped in between then reports an earlier end.
  let at = now()
  if (!lock.isHeld) return
  let end = at
  const isHeld = () => {
    at = now()
    if (!lock.isHeld) return false
    end = at
    return true
  }
  const until = at + Math.max(0, lock.remainingMs - 5) * 1000
  for (const name of lock.names) process.send?.({ begin: { name, token, at, until } })
  for (const name of lock.names) {
    const value = await ask({ read: { name, token } })
    if (ms > 0) await sleep(ms)
    if (value !== undefined && isHeld()) process.send?.({ write: { name, token, value } })
  }
  isHeld()
  // Report before the release: a process that is killed after it must not seem to hold the name.
  for (const name of lock.names) await send({ end: { name, token, end } })
}

async function contend() {
  while (isWorking) {
    const first = Math.floor(random(SHARED_NAMES.length))
    const names =
      random(1) < 0.85 ? [SHARED_NAMES[first]] : [SHARED_NAMES[first], SHARED_NAMES[(first + 1) % SHARED_NAMES.length]]
    // Sometimes a short lease, which is renewed while it is held.
    const isLong = random(1) < 0.02
    const more = { ttlMs: isLong ? 1000 : SHARED_TTL_MS }
    const lock = random(1) < 0.8 ? await acquire(names, 3000, more) : await tryAcquire(names, more)
    if (!lock) {
      await sleep(random(20))
      continue
    }
    counts.granted++
    await hold(lock, isLong ? 1500 : random(1) < 0.1 ? 50 : 0)
    await release(lock)
    await sleep(random(5))
  }
}

// ---- Load on free names ---------------------------------------------------------------------------------------------

async function pair(name) {
  const lock = await tryAcquire(name, { ttlMs: OWN_TTL_MS })
  if (!lock) return
  counts.granted++
  await release(lock)
}

/** Makes `rate` pairs per second, whether or not earlier ones have been answered. */
async function pairs(rate) {
  let due = 0
  for (let last = performance.now(); isWorking; await sleep(10)) {
    const at = performance.now()
    // After a stall the process catches up on one second at most.
    due = Math.min(due + ((at - last) * rate) / 1000, rate)
    last = at
    for (; due >= 1; due--) pair(`pair:${tag}:${++serial}`)
  }
}

/** Acquires a name of its own five times per second. The grants show when the store serves this process again. */
async function probe() {
  for (; isWorking; await sleep(PROBE_MS)) {
    const name = `probe:${tag}:${++serial}`
    tryAcquire(name, { ttlMs: OWN_TTL_MS }).then((lock) => {
      if (!lock) return
      process.send?.({ probe: now() })
      return release(lock)
    })
  }
}

// ---- Requests of the runner -----------------------------------------------------------------------------------------

const verbs = {
  async open() {
    service = await LockService.connect(target, { ...options, storeTimeoutMs: STORE_TIMEOUT_MS })
    held = await service.acquire(`held:${tag}`, { ttlMs: OWN_TTL_MS })
  },

  async work({ contenders, rate }) {
    isWorking = true
    loops = [...Array.from({ length: contenders }, contend), probe()]
    if (rate > 0) loops.push(pairs(rate))
  },

  /** Makes many calls for free names at once. */
  async burst({ count }) {
    const startedAt = performance.now()
    const locks = await Promise.all(
      Array.from({ length: count }, (_, index) => tryAcquire(`burst:${tag}:${serial}:${index}`, { ttlMs: OWN_TTL_MS })),
    )
    serial++
    const granted = locks.filter(Boolean)
    await Promise.all(granted.map(release))
    return { granted: granted.length, ms: Math.round(performance.now() - startedAt) }
  },

  /** Starts many waiters for one name, which other processes want as well. */
  async waiters({ count, waitMs }) {
    let granted = 0
    const wait = async () => {
      const lock = await acquire('contended', waitMs)
      if (!lock) return
      granted++
      await hold(lock, 0)
      await release(lock)
    }
    await Promise.all(Array.from({ length: count }, wait))
    return { granted }
  },

  /** Ends the load, and waits until every call has been answered. */
  async rest() {
    isWorking = false
    await Promise.all(loops)
    while (inFlight > 0) await sleep(20)
    if (!held.isHeld) violation('a renewed lease of 30 s was lost')
    return service.list().then(
      (all) => all.map(({ name }) => name),
      (error) => violation(`list failed: ${error.message}`).then(() => []),
    )
  },

  async close() {
    const startedAt = performance.now()
    await service.close()
    const tookMs = Math.round(performance.now() - startedAt)
    if (tookMs > STORE_TIMEOUT_MS + SLACK_MS) violation(`close took ${tookMs} ms`)
    service = held = undefined
    return tookMs
  },

  async memory() {
    for (let round = 0; round < 3; round++) {
      collectGarbage()
      await sleep(20)
    }
    return process.memoryUsage.rss()
  },

  async counts() {
    const { granted, failed } = counts
    Object.assign(counts, { granted: 0, failed: {} })
    return { granted, failed }
  },
}

process.on('message', async ({ id, verb, reply, ...order }) => {
  if (reply !== undefined || verb === undefined) {
    replies.get(id)(reply?.value)
    replies.delete(id)
    return
  }
  try {
    process.send?.({ id, result: (await verbs[verb](order)) ?? null })
  } catch (error) {
    process.send?.({ id, error: `${verb}: ${error.message}` })
  }
})
// The runner has ended.
process.on('disconnect', () => process.exit())
process.on('unhandledRejection', (/** @type {any} */ error) =>
  violation(`unhandled rejection: ${error?.stack ?? error}`),
)
process.send?.({ ready: true })
