// ZooKeeper with three servers: a follower that is silently cut off from its leader, and no majority.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { LockService } from '../index.js'
import { locateZookeeper } from '../scripts/zookeeper.mjs'
import { zookeeper } from './drivers/zookeeper.mjs'
import { canStartServer, random } from './stores.mjs'
import { sleep, until } from './tools.mjs'

describe('zookeeper: three servers', () => {
  /** @typedef {Awaited<ReturnType<typeof zookeeper.startCluster>>} Cluster */
  /** @type {Cluster | undefined} */
  let cluster
  // With the default time for the detection of a broken link: ten seconds.
  before(async () => void (cluster = await zookeeper.startCluster({ syncLimit: 5 }).catch(() => undefined)))
  after(() => cluster?.stop())
  /** @typedef {(indexes: number[], options?: import('../index.js').ConnectOptions) => Promise<LockService>} Connect */
  /** @param {string} name @param {(cluster: Cluster, connect: Connect) => Promise<void>} body */
  const test = (name, body) =>
    it(name, { timeout: 150_000 }, async (t) => {
      if (!(await canStartServer(t, 'zookeeper', locateZookeeper))) return
      assert.ok(cluster, 'the servers have not started')
      const keyPrefix = `${random()}:`
      /** @type {LockService[]} */
      const services = []
      /** @type {Connect} */
      const connect = async (indexes, options) => {
        const service = await LockService.connect(String(cluster?.url(...indexes)), {
          connectMs: 20_000,
          keyPrefix,
          ...options,
        })
        services.push(service)
        return service
      }
      try {
        await body(cluster, connect)
      } finally {
        cluster.heal()
        for (const member of cluster.members) member.resume()
        await Promise.all(services.map((service) => service.close()))
      }
    })

  // The follower answers reads for some seconds more. With the rule of reads there were two holders for 8 s.
  test('a follower that is cut off from its leader holds no lock that the leader grants to another process', async (cluster, connect) => {
    const leader = await cluster.leader()
    const [cut, other] = [0, 1, 2].filter((index) => index !== leader)
    const [a, b] = await Promise.all([connect([cut]), connect([leader, other])])
    const lock = await a.acquire('n')
    const lost = new Promise((resolve) => lock.signal.addEventListener('abort', () => resolve(performance.now())))
    const waiting = b.acquire('n', { waitMs: 60_000 }).then((next) => ({ next, at: performance.now() }))
    await sleep(500)
    assert.ok(lock.isHeld)
    cluster.silence(cut, leader)
    const cutAt = performance.now()
    const { next, at } = await waiting
    assert.equal(lock.isHeld, false, 'two holders')
    const lostAt = /** @type {number} */ (await lost)
    assert.ok(lostAt < at, `lost ${lostAt - at} ms after the next grant`)
    assert.ok(at - cutAt > 4000, 'the session lasts for a while')
    assert.ok(next.fencingToken > lock.fencingToken)
    await next.release()
  })

  test('without a majority calls fail within their limit, and go on when it is back', async (cluster, connect) => {
    const leader = await cluster.leader()
    const a = await connect([leader], { storeTimeoutMs: 2000 })
    const lock = await a.acquire('n')
    const stopped = cluster.members.filter((_, index) => index !== leader)
    for (const member of stopped) await member.kill()
    const began = performance.now()
    await assert.rejects(a.acquire('other', { waitMs: 1000 }), { code: 'LOCK_STORE', retryable: true })
    assert.ok(performance.now() - began < 6000)
    await until('the lock is lost', () => !lock.isHeld, 20_000)
    await Promise.all(stopped.map((member) => member.restart()))
    const next = await until('a call is served', () => a.tryAcquire('n').catch(() => undefined), 60_000)
    assert.ok(next.fencingToken > lock.fencingToken)
    await next.release()
  })
})
