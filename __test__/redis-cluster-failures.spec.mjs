// The connections to the masters of a cluster, with and without TLS: broken and silent connections, slots that move, failovers.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { LockService } from '../index.js'
import { redisTls } from '../scripts/certificates.mjs'
import { redisCommand } from '../scripts/redis-command.mjs'
import { locateRedis } from '../scripts/servers.mjs'
import { nodeId, startRedisCluster } from '../scripts/topologies.mjs'
import { connectionsTo } from './redis-client.mjs'
import { killConnection, pair, startLoad, untilConnected } from './redis-load.mjs'
import { canStartServer, random } from './stores.mjs'
import { later, rejects, sleep, until } from './tools.mjs'

const TIMEOUT_MS = 120_000
const FAILOVER_MS = 60_000
/** Slack for a machine that stands still. */
const SLACK_MS = 5000

for (const secure of [false, true]) {
  describe(`a cluster ${secure ? 'with' : 'without'} TLS`, { timeout: 2 * TIMEOUT_MS }, () => {
    let tls
    let cluster
    let isMissing = false
    /** A hash tag of each master's slots, and these slots. */
    let tags
    let slots

    before(async () => {
      if (process.env.HOLDFAST_TEST_REDIS_CLUSTER_URL === undefined) return void (isMissing = true)
      tls = secure ? await redisTls() : undefined
      // No failover while the machine stands still, or while a test suspends a node.
      cluster = await startRedisCluster({ replica: true, tls, args: ['--cluster-node-timeout', '30000'] })
      const all = Array.from({ length: 40 }, (_, i) => `t${i}`)
      const found = await Promise.all(
        all.map(async (tag) => Number((await redisCommand(cluster.nodes[0].port, `CLUSTER KEYSLOT ${tag}`)).slice(1))),
      )
      const index = [0, 1, 2].map((master) => found.findIndex((slot) => Math.floor((slot * 3) / 16384) === master))
      tags = index.map((at) => all[at])
      slots = index.map((at) => found[at])
    })

    after(async () => {
      await cluster?.stop()
      await tls?.remove()
    })

    /** @typedef {(connect: (options?: object) => Promise<LockService>, name: (master: number, n: string | number) => string) => Promise<void>} Body */
    /** Declares a test with its own prefix. `name(master, n)` returns a name in a slot of this master. @param {Body} body */
    const test = (title, body) =>
      it(title, { timeout: TIMEOUT_MS }, async (t) => {
        if (isMissing) return void (await canStartServer(t, 'redis-cluster', locateRedis))
        /** @type {LockService[]} */
        const services = []
        const keyPrefix = `${random()}:`
        const connect = async (options) => {
          const security = secure ? { tls: { caFile: tls.caFile } } : {}
          const service = await LockService.connect(cluster.url, { keyPrefix, ...security, ...options })
          services.push(service)
          return service
        }
        try {
          await body(connect, (master, n) => `{${tags[master]}}${n}`)
          const [locks] = services
          await until('nothing is left', async () => (await locks.list()).length === 0)
        } finally {
          await Promise.all(services.map((service) => service.close()))
        }
      })

    const masters = () => cluster.nodes.slice(0, 3)
    /** Makes a pair in a slot of each master until there is a connection to each. */
    const warm = (locks, name) =>
      untilConnected(masters(), () => Promise.all([0, 1, 2].map((master) => pair(locks, name(master, 'warm')))))

    test('pairs use one connection to each master, 1024 at once', async (connect, name) => {
      const locks = await connect()
      await warm(locks, name)
      const names = Array.from({ length: 1024 }, (_, i) => name(i % 3, i))
      const taken = await Promise.all(names.map((each) => locks.tryAcquire(each)))
      assert.ok(taken.every((lock, i) => lock?.name === names[i]))
      const again = await Promise.all(names.map((each) => locks.tryAcquire(each)))
      assert.ok(again.every((lock) => lock === null))
      assert.ok((await Promise.all(taken.map((lock) => lock?.release()))).every(Boolean))
      for (const { port } of masters()) assert.equal((await connectionsTo(port)).length, 1)
    })

    test('a broken connection fails no call and is opened again', async (connect, name) => {
      const locks = await connect()
      await warm(locks, name)
      const calls = Array.from({ length: 60 }, (_, i) => locks.tryAcquire(name(i % 3, i)))
      const killed = await Promise.all(masters().map(killConnection))
      calls.push(...Array.from({ length: 60 }, (_, i) => locks.tryAcquire(name(i % 3, 60 + i))))
      for (const lock of await Promise.all(calls)) assert.equal(await lock?.release(), true)
      await warm(locks, name)
      const opened = await Promise.all(masters().map(({ port }) => connectionsTo(port)))
      assert.ok(
        opened.every(([id], i) => id !== killed[i]),
        `${opened}`,
      )
    })

    test('a master that hangs delays only the calls of its slots, which reject in time', async (connect, name) => {
      const storeTimeoutMs = 8000
      const locks = await connect({ storeTimeoutMs })
      await warm(locks, name)
      const held = await locks.acquire(name(1, 'held'), { ttlMs: 60_000 })
      const [, hanging] = masters()
      await hanging.pause()
      try {
        const began = performance.now()
        let settled = 0
        const calls = [locks.tryAcquire(name(1, 'a')), locks.acquire(name(1, 'b'), { waitMs: 60_000 })]
        for (const call of calls) later(call.finally(() => settled++))
        for (let i = 0; i < 50; i++) await Promise.all([pair(locks, name(0, i)), pair(locks, name(2, i))])
        assert.equal(settled, 0, 'pairs of other slots did not wait for the node that hangs')
        for (const call of calls) await rejects(call, 'LOCK_STORE', { retryable: true, engine: 'redis' })
        const took = performance.now() - began
        assert.ok(took < storeTimeoutMs + SLACK_MS, `${took} ms`)
        await Promise.all([pair(locks, name(0, 'later')), pair(locks, name(2, 'later'))])
      } finally {
        hanging.resume()
      }
      await until('a pair', () =>
        pair(locks, name(1, 'again')).then(
          () => true,
          ({ code }) => assert.equal(code, 'LOCK_STORE'),
        ),
      )
      await warm(locks, name)
      assert.equal(held.isHeld, true)
      assert.equal(await held.release(), true)
    })

    test('locks are kept while their slot moves, and no name has two holders', async (connect, name) => {
      // Attempts that a moving slot refuses are repeated for this long.
      const limits = { storeTimeoutMs: 6000 }
      // `idle` makes no calls while the slot moves, so only a `MOVED` reply can inform it of the move.
      const [locks, others, idle] = [await connect(limits), await connect(limits), await connect(limits)]
      const [, source, target] = masters()
      // One connection of each service to each of the two masters.
      await until('connections to both', async () => {
        await Promise.all(
          [locks, others, idle].flatMap((each) => [pair(each, name(1, random())), pair(each, name(2, 'warm'))]),
        )
        const connections = await Promise.all([source, target].map(({ port }) => connectionsTo(port)))
        return connections.every((ids) => ids.length === 3)
      })
      const before = await connectionsTo(source.port)
      const held = await Promise.all(Array.from({ length: 8 }, (_, i) => locks.acquire(name(1, `held${i}`))))
      const load = startLoad(
        [locks, others],
        ['w', 'x', 'y', 'z'].map((n) => name(1, n)),
      )
      await until('a load', () => load.counts.served > 50)
      const errors = async () => {
        const info = await redisCommand(source.port, 'INFO errorstats')
        const entries = [...info.matchAll(/errorstat_(\w+):count=(\d+)/g)]
        return Object.fromEntries(entries.map(([, kind, count]) => [kind, Number(count)]))
      }
      const [from, to] = await Promise.all([nodeId(source), nodeId(target)])
      const slot = slots[1]
      const move = async (keys) => {
        for (const key of keys)
          await redisCommand(source.port, `MIGRATE 127.0.0.1 ${target.tlsPort || target.port} ${key} 0 5000`)
      }
      const keys = async () =>
        (await redisCommand(source.port, `CLUSTER GETKEYSINSLOT ${slot} 1000`))
          .split('\r\n')
          .filter((line) => /[:{]/.test(line))
      await redisCommand(target.port, `CLUSTER SETSLOT ${slot} IMPORTING ${from}`)
      await redisCommand(source.port, `CLUSTER SETSLOT ${slot} MIGRATING ${to}`)
      const locked = (await keys()).filter((key) => /^\w+:\{\w+\}held[0-3]$/.test(key))
      assert.equal(locked.length, 4, `${locked}`)
      await move(locked)
      // Calls of one tick for names on both nodes.
      const tries = await Promise.allSettled(held.map((lock) => others.tryAcquire(lock.name)))
      for (const { value, reason } of /** @type {any[]} */ (tries)) {
        assert.ok(value === null || reason?.code === 'LOCK_STORE', `${value?.name ?? reason}`)
      }
      await sleep(300)
      // Calls continue to create keys on the target only.
      for (let left = await keys(); left.length > 0; left = await keys()) await move(left)
      const refused = await errors()
      assert.ok(refused.ASK > 0 && refused.TRYAGAIN > 0, JSON.stringify(refused))
      assert.deepEqual(await connectionsTo(source.port), before, 'refusals do not close a connection')
      for (const { port } of [target, source, masters()[0]])
        await redisCommand(port, `CLUSTER SETSLOT ${slot} NODE ${to}`)
      const { served } = load.counts
      await until('calls at the new master', () => load.counts.served > served + 100)
      await load.stop()
      const { MOVED = 0 } = await errors()
      await pair(idle, name(1, 'idle'))
      assert.ok((await errors()).MOVED > MOVED)
      for (const lock of held) {
        assert.equal(await others.tryAcquire(lock.name), null)
        await lock.extend(30_000)
        assert.equal(await lock.release(), true)
      }
      assert.equal((await connectionsTo(target.port)).length, 3)
      // The slots as they were.
      await redisCommand(source.port, `CLUSTER SETSLOT ${slot} IMPORTING ${to}`)
      await redisCommand(target.port, `CLUSTER SETSLOT ${slot} MIGRATING ${from}`)
      const back = (await redisCommand(target.port, `CLUSTER GETKEYSINSLOT ${slot} 1000`)).split('\r\n')
      for (const key of back.filter((line) => /[:{]/.test(line)))
        await redisCommand(target.port, `MIGRATE 127.0.0.1 ${source.tlsPort || source.port} ${key} 0 5000`)
      for (const { port } of [source, target, masters()[0]])
        await redisCommand(port, `CLUSTER SETSLOT ${slot} NODE ${from}`)
    })

    /** Waits until a node has a role, and its replica is in the state online. */
    const becomes = (node, role) =>
      until(
        role,
        async () => {
          const info = await redisCommand(node.port, 'INFO replication')
          return info.includes(`role:${role}`) && (role === 'master' || info.includes('master_link_status:up'))
        },
        FAILOVER_MS,
      )

    test('failovers under load keep a held lease, and calls continue on the new master', async (connect, name) => {
      const locks = await connect()
      await warm(locks, name)
      const others = await connect()
      const [first, , , replica] = cluster.nodes
      const held = await locks.acquire(name(0, 'held'))
      const names = ['w', 'x', 'y', 'z'].map((n) => name(0, n))

      // Ordered by the operator: nothing that the old master answered is lost.
      let load = startLoad([locks, others], names)
      await until('a load', () => load.counts.served > 50)
      await redisCommand(replica.port, 'CLUSTER FAILOVER')
      await becomes(replica, 'master')
      let { served } = load.counts
      await until('calls at the new master', () => load.counts.served > served + 100, FAILOVER_MS)
      await until(
        'a connection of each service',
        async () => (await connectionsTo(replica.port)).length === 2,
        FAILOVER_MS,
      )
      await load.stop()
      assert.equal(await others.tryAcquire(held.name), null)
      await held.extend(60_000)
      await becomes(first, 'slave')

      // A crash. Grants that the master did not replicate are lost, and their tokens with them.
      await until('the replica has the lock', async () => {
        const info = await redisCommand(replica.port, 'INFO replication')
        const [, sent] = /master_repl_offset:(\d+)/.exec(info) ?? []
        const [, acknowledged] = /offset=(\d+)/.exec(info) ?? []
        return sent === acknowledged
      })
      for (const { port } of cluster.nodes) await redisCommand(port, 'CONFIG SET cluster-node-timeout 2000')
      load = startLoad([locks, others], names, { tokensGrow: false })
      await until('a load', () => load.counts.served > 50)
      await replica.kill()
      await becomes(first, 'master')
      served = load.counts.served
      await until('calls at the new master', () => load.counts.served > served + 100, FAILOVER_MS)
      await until(
        'a connection of each service',
        async () => (await connectionsTo(first.port)).length === 2,
        FAILOVER_MS,
      )
      await load.stop()
      assert.equal(held.signal.aborted, false)
      assert.equal(await others.tryAcquire(held.name), null)
      await held.extend(60_000)
      assert.equal(await held.release(), true)
    })
  })
}
