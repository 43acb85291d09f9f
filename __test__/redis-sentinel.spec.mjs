// The contract under Redis Sentinel, and held locks and waiters across a failover.
import assert from 'node:assert/strict'
import { it } from 'node:test'
import { LockService } from '../index.js'
import { startRedisSentinel } from '../scripts/topologies.mjs'
import { contract } from './contract.mjs'
import { missing, skip } from './stores.mjs'
import { until } from './tools.mjs'

contract('redis-sentinel')

const TIMEOUT_MS = 180_000
const FAILOVER_TIMEOUT_MS = 60_000
/** Longer than the half minute for which sentinels are passive after their machine stalled. */
const TTL_MS = 45_000

/** @param {(master: any) => Promise<unknown>} end */
async function failOver(end) {
  const redis = await startRedisSentinel()
  /** @type {LockService[]} */
  const services = []
  const connect = async (options) => {
    const service = await LockService.connect(redis.url, { minReplicas: 1, ...options })
    services.push(service)
    return service
  }
  try {
    let renewals = 0
    const onEvent = ({ type }) => {
      if (type === 'renewed') renewals++
    }
    const [holder, ...others] = [await connect({ onEvent }), await connect(), await connect()]
    const lock = await holder.acquire('job', { ttlMs: TTL_MS })
    /** @type {[number, number, bigint][]} */
    const served = []
    const waiting = others.flatMap((service, index) =>
      [0, 1].map((number) =>
        service.using(
          'job',
          { ttlMs: TTL_MS, waitMs: 120_000 },
          (next) => void served.push([index, number, next.fencingToken]),
        ),
      ),
    )
    await until('all calls wait', () => others.every((service) => service.stats().waiting === 2))

    const old = await redis.master()
    await end(old)
    await until('a new master', async () => (await redis.master()) !== old, FAILOVER_TIMEOUT_MS)
    const before = renewals
    await until('a renewal at the new master', () => renewals > before, FAILOVER_TIMEOUT_MS)
    assert.equal(lock.isHeld, true)
    assert.equal(lock.signal.aborted, false)
    assert.equal(served.length, 0, 'no waiter was granted the held lock')
    assert.equal(await lock.release(), true)
    await Promise.all(waiting)
    const tokens = [lock.fencingToken, ...served.map(([, , token]) => token)]
    assert.equal(tokens.length, 5)
    for (let i = 1; i < tokens.length; i++) assert.ok(tokens[i] > tokens[i - 1], `${tokens}`)
    // The same services continue.
    for (const service of services) {
      assert.equal(await service.using('again', (again) => again.isHeld), true)
      assert.equal(service.stats().lost, 0)
    }
  } finally {
    await Promise.all(services.map((service) => service.close()))
    await redis.stop()
  }
}

/** @type {[string, (master: any) => Promise<void>][]} */
const FAULTS = [
  ['is killed', (master) => master.kill()],
  ['hangs', (master) => master.pause()],
]
for (const [how, end] of FAULTS) {
  it(`a lease is kept and waiters are served when the master ${how}`, { timeout: TIMEOUT_MS }, (t) => {
    const reason = missing('redis-sentinel')
    return reason ? skip(t, reason) : failOver(end)
  })
}
