// A quorum whose nodes fail under load, on separate servers. Each exported case resolves to its figures, and rejects when a
// guarantee is broken. `npm run soak` runs all of them.
import assert from 'node:assert/strict'
import { startRedis } from '../../scripts/servers.mjs'
import { LockService } from '../../index.js'
import { openRedis } from '../redis-client.mjs'
import { sleep, stopwatch, until } from '../tools.mjs'

/** Slack for the machine, in addition to the time for which this process stalled. */
const SLACK_MS = 500

const rss = () => {
  globalThis.gc?.()
  return process.memoryUsage.rss()
}

async function onNodes(options, body) {
  const nodes = await Promise.all([1, 2, 3].map(() => startRedis()))
  const locks = await LockService.connect(
    nodes.map((node) => node.url),
    options,
  )
  try {
    return await body(locks, nodes)
  } finally {
    for (const node of nodes) node.resume()
    await locks.close()
    await Promise.all(nodes.map((node) => node.stop()))
  }
}

/** Starts calls at a rate for `seconds`. Returns a promise of the outcome of each. */
async function atRate(perSecond, seconds, call) {
  const startedAt = performance.now()
  const calls = []
  while (performance.now() - startedAt < seconds * 1000) {
    const due = Math.min(calls.length + perSecond / 10, ((performance.now() - startedAt) / 1000) * perSecond)
    while (calls.length < due) calls.push(Promise.allSettled([call(calls.length)]).then(([outcome]) => outcome))
    await sleep(5)
  }
  return calls
}

/**
 * Asserts that no call failed in another way than it may while nodes do not answer.
 *
 * @param {PromiseSettledResult<unknown>[]} outcomes
 */
function assertExpected(outcomes) {
  const unexpected = outcomes.flatMap((outcome) =>
    outcome.status === 'rejected' && !outcome.reason.retryable ? [String(outcome.reason)] : [],
  )
  assert.deepEqual(unexpected, [])
}

/** Lists the lock keys of the nodes, without companions. */
async function lockKeys(nodes) {
  const found = await Promise.all(
    nodes.map(async ({ url }) => {
      const redis = openRedis(url)
      const keys = await redis.keys('lock:*')
      redis.disconnect()
      return keys
    }),
  )
  return found.flat()
}

const MIB = 2 ** 20
const BYTES_PER_CALL = 2048
/** Memory that the JavaScript heap and the allocator keep after any number of calls. */
const HEAP_BYTES = 48 * MIB

/** 1 500 locks per second while one node is down: memory is bounded, and nothing is left on the restarted node. */
export async function nodeDown(seconds = 30) {
  return onNodes({}, async (locks, nodes) => {
    const pair = async (i) => {
      const lock = await locks.acquire(`pair ${i}`, { ttlMs: 30_000 })
      await lock.release()
    }
    await Promise.all(await atRate(500, 2, pair))
    await nodes[2].pause()
    const before = rss()
    let peak = before
    const watch = setInterval(() => (peak = Math.max(peak, process.memoryUsage.rss())), 100)
    const results = await Promise.all(await atRate(1500, seconds, (i) => pair(`down ${i}`)))
    clearInterval(watch)
    assertExpected(results)
    const failed = results.filter(({ status }) => status === 'rejected').length
    assert.ok(failed < results.length, 'no call was granted its lock by the two other nodes')
    assert.ok(peak - before < 100 * MIB, `${Math.round((peak - before) / MIB)} MiB more with a node down`)
    await nodes[2].resume()
    await until('nothing is left on the nodes', async () => (await lockKeys(nodes)).length === 0, 10_000)
    return { pairs: results.length, failed, growthMiB: Math.round((peak - before) / MIB) }
  })
}

/** 1 000 calls per second while a majority stalls: nothing is left 2 s later, and calls succeed again at once. */
export async function majorityStalled(seconds = 20) {
  return onNodes({}, async (locks, nodes) => {
    // The memory that the first calls allocate does not count as growth.
    const pair = async (i) => (await locks.acquire(`first ${i}`, { ttlMs: 30_000 })).release()
    await Promise.all(await atRate(1000, 2, pair))
    const before = rss()
    await Promise.all([nodes[1].pause(), nodes[2].pause()])
    let peak = before
    const watch = setInterval(() => (peak = Math.max(peak, process.memoryUsage.rss())), 100)
    // Expected errors are dropped: they would count as memory of the calls.
    const acquire = (i) =>
      locks.tryAcquire(`stalled ${i}`, { ttlMs: 60_000 }).catch((error) => {
        if (!error.retryable) throw error
        return null
      })
    const calls = await atRate(1000, seconds, acquire)
    const results = Promise.all(calls)
    const sinceResumed = stopwatch()
    await Promise.all([nodes[1].resume(), nodes[2].resume()])
    await until(
      'a grant',
      () =>
        locks.acquire('next').then(
          (lock) => lock.release(),
          () => false,
        ),
      10_000,
    )
    const recoveredMs = sinceResumed()
    const settled = await results
    clearInterval(watch)
    assertExpected(settled)
    const granted = settled.filter(({ value }) => value)
    await Promise.all(granted.map(({ value }) => value.release()))
    const sinceSettled = stopwatch()
    let left = []
    const isEmpty = async () => (left = await lockKeys(nodes)).length === 0
    await until('no key without a holder', isEmpty, 10_000).catch(() => {
      assert.fail(`${left.length} keys without a holder after 10 s, for instance ${left.slice(0, 3).join()}`)
    })
    const emptyMs = sinceSettled()
    const failed = settled.length - granted.length
    await sleep(3000)
    const facts = {
      failed,
      granted: granted.length,
      recoveredMs,
      emptyMs,
      bytesPerCall: Math.round((peak - before) / settled.length),
      bytesPerCallKept: Math.round((rss() - before) / settled.length),
    }
    const text = JSON.stringify(facts)
    assert.ok(recoveredMs < 2000 + SLACK_MS, `recovery took ${recoveredMs} ms: ${text}`)
    assert.ok(emptyMs < 2000 + SLACK_MS, `keys without a holder for ${emptyMs} ms: ${text}`)
    assert.ok(peak - before < settled.length * BYTES_PER_CALL + HEAP_BYTES, `${Math.round(peak / MIB)} MiB: ${text}`)
    return facts
  })
}

/** 20 000 calls at once and 1 000 pairs per second on slow nodes: each call ends in time, and a lease of 30 s is renewed. */
export async function burstOnSlowNodes(count = 20_000, seconds = 15) {
  const storeTimeoutMs = 5000
  return onNodes({ storeTimeoutMs }, async (locks, nodes) => {
    const held = await locks.acquire('held', { ttlMs: 30_000 })
    const counts = { granted: 0, failed: 0, slowestMs: 0 }
    const pair = async (name) => {
      const sinceCalled = stopwatch()
      const lock = await locks.tryAcquire(name, { ttlMs: 30_000 }).catch((error) => {
        if (!error.retryable) throw error
      })
      counts.slowestMs = Math.max(counts.slowestMs, sinceCalled())
      counts[lock ? 'granted' : 'failed']++
      // A failed release continues in the background.
      await lock?.release().catch(() => {})
    }
    await Promise.all(await atRate(1000, 2, (i) => pair(`first ${i}`)))
    const before = rss()
    let [peak, isSlow] = [before, true]
    const watch = setInterval(() => (peak = Math.max(peak, process.memoryUsage.rss())), 100)
    const slowness = (async () => {
      while (isSlow) {
        for (const node of nodes) node.pause()
        await sleep(95)
        for (const node of nodes) node.resume()
        await sleep(5)
      }
    })()
    const burst = Array.from({ length: count }, (_, i) => pair(`burst ${i}`))
    const beside = await atRate(1000, seconds, (i) => pair(`beside ${i}`))
    await Promise.all(burst)
    assertExpected(await Promise.all(beside))
    isSlow = false
    await slowness
    clearInterval(watch)
    const wasHeld = held.isHeld
    await held.release().catch(() => {})
    const sinceSettled = stopwatch()
    const isEmpty = async () => (await lockKeys(nodes)).length === 0
    const emptyMs = await until('nothing is left', isEmpty, 15_000).then(sinceSettled, () => Infinity)
    const facts = {
      ...counts,
      wasHeld,
      emptyMs,
      bytesPerCall: Math.round((peak - before) / (counts.granted + counts.failed)),
      peakMiB: Math.round(peak / MIB),
    }
    const text = JSON.stringify(facts)
    assert.ok(wasHeld, `a renewed lease was lost: ${text}`)
    assert.ok(counts.slowestMs < storeTimeoutMs + 1000 + SLACK_MS, `a call took ${counts.slowestMs} ms: ${text}`)
    assert.ok(emptyMs < 2000 + SLACK_MS, `keys are left after ${emptyMs} ms: ${text}`)
    assert.ok(peak - before < (count + 1000 * seconds) * BYTES_PER_CALL + HEAP_BYTES, `${facts.peakMiB} MiB: ${text}`)
    return facts
  })
}
