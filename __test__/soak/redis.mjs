// Long cases on Redis for `npm run soak`: a stall under load, and a burst.
import assert from 'node:assert/strict'
import { LockService } from '../../index.js'
import { startRedis } from '../../scripts/servers.mjs'
import { startProxy } from '../proxy.mjs'
import { openRedis } from '../redis-client.mjs'
import { sleep, stopwatch } from '../tools.mjs'

/** Slack for a machine that stalls for a second. */
const SLACK_MS = 1000

/**
 * Records when the last attempt to acquire each name passes a proxy: `SET`, or the acquire script. That has four keys, an owner
 * and a ttl of at least a second; a release with four keys has a shorter number there, or none.
 */
function recordAttempts(proxy, prefix) {
  const attempts = new Map()
  const name = `\\$\\d+\\r\\n(${prefix}[a-z]\\d+)\\r\\n`
  const script = `\\$1\\r\\n4\\r\\n${name}(?:\\$\\d+\\r\\n[^\\r]+\\r\\n){4}\\$[4-9]\\r\\n\\d+\\r\\n`
  const pattern = new RegExp(`\\$3\\r\\nSET\\r\\n${name}|${script}`, 'g')
  const rests = new WeakMap()
  proxy.onRequest = (connection, data) => {
    const text = (rests.get(connection) ?? '') + data.toString('latin1')
    const now = performance.now()
    let end = 0
    for (const match of text.matchAll(pattern)) {
      attempts.set(match[1] ?? match[2], now)
      end = match.index + match[0].length
    }
    rests.set(connection, text.slice(Math.max(end, text.length - 500)))
  }
  return attempts
}

const rssMb = () => process.memoryUsage.rss() / 2 ** 20
const memory = () =>
  Object.fromEntries(Object.entries(process.memoryUsage()).map(([k, v]) => [k, Math.round(v / 2 ** 20)]))

/**
 * Stops the server for `stallMs` under `perSecond` calls, most of them with default options. Checks and returns the figures.
 */
export async function stall({ stallMs = 20_000, perSecond = 1000, log = (..._facts) => {} } = {}) {
  const redis = await startRedis()
  const other = openRedis(redis.url)
  const proxy = await startProxy(redis.port)
  const prefix = 'stall:'
  const attempts = recordAttempts(proxy, prefix)
  const locks = await LockService.connect(`redis://127.0.0.1:${proxy.port}`, { keyPrefix: prefix })
  const rejected = new Map()
  const result = { calls: 0, failed: 0, granted: 0 }
  let firstGrantMs
  let isBack = false
  const call = (i) => {
    const name = `n${i}`
    result.calls++
    const began = performance.now()
    // A third of the leases is shorter than the stall: they begin when the server executes the received commands.
    const options = i % 3 === 0 ? { ttlMs: 10_000 } : undefined
    const taken = i % 2 === 0 ? locks.tryAcquire(name, options) : locks.acquire(name, options)
    taken.then(
      (lock) => {
        // An unhandled rejection ends the run.
        if (!lock) throw new Error(`${name} is free and was busy`)
        result.granted++
        if (isBack && began > backAt) firstGrantMs ??= sinceBack()
        lock.release().catch(() => {})
      },
      (error) => {
        if (error.code !== 'LOCK_STORE') throw error
        result.failed++
        rejected.set(prefix + name, performance.now())
      },
    )
  }
  let backAt = 0
  let sinceBack = stopwatch()
  try {
    for (let i = 0; i < 50; i++) await (await locks.acquire(`w${i}`)).release()
    await sleep(500)
    globalThis.gc?.()
    result.rssBefore = rssMb()
    log(memory())
    process.kill(Number(redis.pid), 'SIGSTOP')
    const began = performance.now()
    let made = 0
    const load = async (endMs) => {
      for (;;) {
        const elapsed = performance.now() - began
        for (; made < (elapsed * perSecond) / 1000; made++) call(made)
        if (elapsed >= endMs) return
        await sleep(5)
      }
    }
    await load(stallMs)
    result.rssPeak = rssMb()
    log(memory())
    process.kill(Number(redis.pid), 'SIGCONT')
    backAt = performance.now()
    sinceBack = stopwatch()
    isBack = true
    await load(stallMs + 1500)
    result.firstGrantMs = firstGrantMs
    await sleep(500 + SLACK_MS)
    const left = (await other.keys(`${prefix}n*`)).filter((key) => rejected.has(key))
    result.left = left.length
    await sleep(5000)
    globalThis.gc?.()
    result.rssAfter = rssMb()
    log(memory())
    result.late = 0
    result.latestMs = 0
    for (const [key, at] of rejected) {
      const lateMs = (attempts.get(key) ?? 0) - at
      result.latestMs = Math.max(result.latestMs, lateMs)
      if (lateMs > SLACK_MS) result.late++
    }
    result.attemptsOfRejected = [...rejected.keys()].filter((key) => attempts.has(key)).length
    result.pending = locks.stats()
    log(result)
    assert.ok(result.failed > (stallMs / 1000 - 6) * perSecond * 0.5, `${result.failed} calls failed`)
    assert.equal(result.late, 0, `${result.late} attempts left after their rejection`)
    assert.equal(result.left, 0, `${result.left} keys without a holder`)
    assert.ok(result.firstGrantMs < 200 + SLACK_MS, `the first grant came after ${result.firstGrantMs} ms`)
    return result
  } finally {
    process.kill(Number(redis.pid), 'SIGCONT')
    await locks.close()
    await proxy.close()
    other.disconnect()
    await redis.stop()
  }
}

/**
 * Acquires `count` free names at once, and starts `count / 20` waiters for one name. Every call is granted; a renewed lease
 * survives, and nothing is left.
 */
export async function burst({ count = 20_000, log = (..._facts) => {} } = {}) {
  const redis = await startRedis()
  const other = openRedis(redis.url)
  const locks = await LockService.connect(redis.url, { keyPrefix: 'burst:' })
  const result = {}
  try {
    const renewed = await locks.acquire('renewed', { ttlMs: 6000 })
    result.rssBefore = rssMb()
    const countByCode = (outcomes) => {
      const counts = {}
      for (const { reason } of outcomes)
        counts[reason ? reason.code : 'granted'] = (counts[reason ? reason.code : 'granted'] ?? 0) + 1
      return counts
    }
    let began = performance.now()
    const free = Array.from({ length: count }, (_, i) =>
      locks.tryAcquire(`n${i}`).then((lock) => (lock ?? assert.fail('a free name was busy')).release()),
    )
    result.free = countByCode(await Promise.allSettled(free))
    result.freeMs = performance.now() - began
    began = performance.now()
    const order = []
    const waiters = Array.from({ length: count / 20 }, (_, i) =>
      locks.using('one', { waitMs: 60_000 }, async () => void order.push(i)),
    )
    result.waiters = countByCode(await Promise.allSettled(waiters))
    result.waitersMs = performance.now() - began
    result.rssPeak = rssMb()
    await sleep(1000)
    const left = (await other.keys('*')).filter((key) => !key.includes('renewed') && key !== 'holdfast:last')
    log({ ...result, left: left.length })
    assert.deepEqual(result.free, { granted: count })
    assert.deepEqual(result.waiters, { granted: count / 20 })
    assert.deepEqual(
      order,
      Array.from({ length: count / 20 }, (_, i) => i),
      'in the order of the calls',
    )
    assert.deepEqual(left, [])
    assert.equal(renewed.isHeld, true, renewed.signal.reason?.message)
    assert.equal(await renewed.release(), true)
    return result
  } finally {
    await locks.close()
    other.disconnect()
    await redis.stop()
  }
}

/**
 * `list()` among millions of other keys takes longer than `storeTimeoutMs`, and succeeds: the limit is for each page. Other calls
 * are served meanwhile.
 */
export async function longList({ foreign = 4_000_000, storeTimeoutMs = 1500, log = (..._facts) => {} } = {}) {
  const redis = await startRedis({ args: ['--enable-debug-command', 'yes'] })
  const other = openRedis(redis.url)
  const locks = await LockService.connect(redis.url, { storeTimeoutMs })
  const result = { foreign, storeTimeoutMs }
  try {
    await other.call('DEBUG', 'POPULATE', foreign, 'foreign', 10)
    const names = Array.from({ length: 500 }, (_, i) => `order:${String(i).padStart(3, '0')}`)
    const held = await Promise.all([...names, 'another'].map((name) => locks.acquire(name, { ttlMs: 10_000 })))
    let isListed = false
    const pairs = (async () => {
      result.pairs = 0
      result.slowestPairMs = 0
      while (!isListed) {
        const began = performance.now()
        await (await locks.acquire('pair')).release()
        result.slowestPairMs = Math.max(result.slowestPairMs, Math.round(performance.now() - began))
        result.pairs++
        await sleep(10)
      }
    })()
    const began = performance.now()
    const found = await locks.list({ prefix: 'order:' }).finally(() => (isListed = true))
    result.listMs = Math.round(performance.now() - began)
    await pairs
    log(result)
    assert.deepEqual(
      found.map(({ name }) => name),
      names,
    )
    assert.ok(
      found.every(({ fencingToken, holder }) => fencingToken && holder),
      'each with its record',
    )
    assert.ok(result.listMs > storeTimeoutMs, `${result.listMs} ms: too few keys to show anything`)
    assert.ok(held.every((lock) => lock.isHeld))
    await Promise.all(held.map((lock) => lock.release()))
    return result
  } finally {
    await locks.close()
    other.disconnect()
    await redis.stop()
  }
}

if (process.argv[1] === import.meta.filename) {
  await burst({ log: console.log })
  await stall({ log: console.log })
}
