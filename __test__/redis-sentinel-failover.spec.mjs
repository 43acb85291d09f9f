// The connection to the master of sentinels, through TLS: pairs, a broken connection, and a failover with a held lease.
import assert from 'node:assert/strict'
import { it } from 'node:test'
import { LockService } from '../index.js'
import { redisTls } from '../scripts/certificates.mjs'
import { redisCommand } from '../scripts/redis-command.mjs'
import { locateRedis } from '../scripts/servers.mjs'
import { startRedisSentinel } from '../scripts/topologies.mjs'
import { connectionsTo } from './redis-client.mjs'
import { killConnection, pair, startLoad, untilConnected } from './redis-load.mjs'
import { canStartServer } from './stores.mjs'
import { until } from './tools.mjs'

const TIMEOUT_MS = 180_000
const FAILOVER_MS = 60_000
/** Longer than the half minute for which sentinels are passive after their machine stalled. */
const TTL_MS = 45_000

it(
  'a failover through TLS keeps a held lease, and calls continue on the new master',
  { timeout: TIMEOUT_MS },
  async (t) => {
    if (!(await canStartServer(t, 'redis-sentinel', locateRedis))) return
    const tls = await redisTls()
    const redis = await startRedisSentinel({ tls })
    /** @type {LockService[]} */
    const services = []
    const connect = async () => {
      const service = await LockService.connect(redis.url, { tls: { caFile: tls.caFile } })
      services.push(service)
      return service
    }
    try {
      const [locks, others] = [await connect(), await connect()]
      const old = (await redis.master()) ?? assert.fail('no master')
      await until('connections', async () => {
        await Promise.all([pair(locks, 'one'), pair(others, 'other')])
        return (await connectionsTo(old.port)).length === 2
      })
      await others.close()

      // A broken connection.
      const calls = Array.from({ length: 20 }, (_, i) => locks.tryAcquire(`n${i}`))
      const killed = await killConnection(old)
      for (const lock of await Promise.all(calls)) assert.equal(await lock?.release(), true)
      await untilConnected([old], () => pair(locks, 'one'))
      assert.notDeepEqual(await connectionsTo(old.port), [killed])

      // A crash.
      const peer = await connect()
      const held = await locks.acquire('held', { ttlMs: TTL_MS })
      await until('replicas that have the lock', async () => {
        const info = await redisCommand(old.port, 'INFO replication')
        const sent = /master_repl_offset:(\d+)/.exec(info)?.[1]
        return [...info.matchAll(/^slave\d.*offset=(\d+)/gm)].every(([, offset]) => offset === sent)
      })
      // Grants that the master did not replicate are lost, and their tokens with them.
      const load = startLoad([locks, peer], ['x', 'y'], { tokensGrow: false })
      await until('a load', () => load.counts.served > 50)
      await old.kill()
      const next = await until(
        'a new master',
        async () => {
          const master = await redis.master()
          return master !== old && master
        },
        FAILOVER_MS,
      )
      const { served } = load.counts
      await until('calls at the new master', () => load.counts.served > served + 100, FAILOVER_MS)
      await load.stop()
      await until('connections to the new master', async () => {
        await Promise.all([pair(locks, 'one'), pair(peer, 'other')])
        return (await connectionsTo(next.port)).length === 2
      })
      assert.equal(held.isHeld, true)
      assert.equal(await peer.tryAcquire('held'), null)
      await held.extend(TTL_MS)
      assert.equal(await held.release(), true)
      await until('nothing is left', async () => (await locks.list()).length === 0)
    } finally {
      await Promise.all(services.map((service) => service.close()))
      await redis.stop()
      await tls.remove()
    }
  },
)
