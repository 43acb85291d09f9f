// The servers of the soak, and the faults of servers and processes.
import { spawn } from 'node:child_process'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { setTimeout as sleep } from 'node:timers/promises'
import { startEtcd } from '../../scripts/etcd.mjs'
import { modeOf, startZookeeper } from '../../scripts/zookeeper.mjs'
import { startMariadb } from '../../scripts/mysql.mjs'
import { startPostgres } from '../../scripts/postgres.mjs'
import { redisCommand } from '../../scripts/redis-command.mjs'
import { startMongod, startRedis } from '../../scripts/servers.mjs'
import { mongoCommand, startRedisCluster, startRedisQuorum, startRedisSentinel } from '../../scripts/topologies.mjs'
import { EtcdClient } from '../etcd-client.mjs'
import { withMysql } from '../mysql-client.mjs'
import { withPostgres } from '../postgres-client.mjs'

/** A killed server must keep what it acknowledged. Without that, a second holder would not be a violation. */
const DURABLE = { args: ['--appendonly', 'yes', '--appendfsync', 'always'] }
const HEALTHY_TIMEOUT_MS = 60_000

const answers = (call, accepts) => call.then(accepts, () => false)
const redisIsUp = ({ port }) => answers(redisCommand(port, 'PING'), (reply) => reply === '+PONG\r\n')
const clusterIsUp = ({ port }) => answers(redisCommand(port, 'CLUSTER INFO'), (reply) => /cluster_state:ok/.test(reply))
/** How another program uses the SQL servers. */
const SQL = {
  postgres: {
    connected: withPostgres,
    lock: 'BEGIN; LOCK TABLE holdfast.locks, holdfast.locks_waiters',
    unlock: 'ROLLBACK',
    terminate: (client) =>
      client.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holdfast'"),
  },
  mysql: {
    connected: withMysql,
    lock: 'LOCK TABLES locks WRITE, locks_waiters WRITE',
    unlock: 'UNLOCK TABLES',
    async terminate(client) {
      const text = "SELECT id FROM information_schema.processlist WHERE user = 'holdfast' AND id <> CONNECTION_ID()"
      const [rows] = await client.query(text)
      // It may have ended.
      for (const { id } of rows) await client.query(`KILL ${id}`).catch(() => {})
    },
  },
}
const sqlOf = ({ target }) => SQL[target.split(':')[0]]
const isUp =
  (kind) =>
  ({ url }) =>
    answers(
      SQL[kind].connected(url, (client) => client.query('SELECT 1')),
      () => true,
    )
const etcdIsUp = ({ url }) => answers(new EtcdClient(url).get('any'), () => true)
const zookeeperIsUp = ({ port }) => answers(modeOf(port), (mode) => mode !== undefined)
const isPrimary = (node) => answers(mongoCommand(node, { hello: 1 }, 1000), (reply) => reply.isWritablePrimary === true)
const all = async (nodes, isUp) => (await Promise.all(nodes.map(isUp))).every(Boolean)

const single = (server, isUp, options = {}) => ({
  target: server.url,
  options,
  nodes: [server],
  isHealthy: () => isUp(server),
  stop: () => server.stop(),
})

/** How to start each store: the arguments of `connect`, the servers, and a check by another client that they serve. */
const STORES = {
  memory: async () => ({ target: 'memory:soak', nodes: [], isHealthy: async () => true, stop: async () => {} }),

  async sqlite() {
    const folder = mkdtempSync(join(process.env.HOLDFAST_SERVERS_DIR || tmpdir(), 'holdfast-soak-'))
    const file = join(folder, 'locks.sqlite')
    return {
      target: `sqlite:${file}`,
      file,
      nodes: [],
      isHealthy: async () => true,
      stop: async () => rmSync(folder, { recursive: true }),
    }
  },

  redis: async () => single(await startRedis(DURABLE), redisIsUp),

  async 'redis-cluster'() {
    const cluster = await startRedisCluster(DURABLE)
    return {
      target: cluster.url,
      nodes: cluster.nodes,
      isHealthy: () => all(cluster.nodes, clusterIsUp),
      stop: cluster.stop,
    }
  },

  async 'redis-sentinel'() {
    const group = await startRedisSentinel()
    const hasReplica = (info) => /role:master/.test(info) && /state=online/.test(info)
    const replicates = ({ port }) => answers(redisCommand(port, 'INFO replication'), hasReplica)
    return {
      target: group.url,
      // A failover to a replica must not lose what was granted.
      options: { minReplicas: 1 },
      nodes: group.servers,
      master: group.master,
      isHealthy: async () => {
        const master = await group.master()
        return master !== undefined && (await redisIsUp(master)) && replicates(master)
      },
      stop: group.stop,
    }
  },

  async 'redis-quorum'() {
    const quorum = await startRedisQuorum(DURABLE)
    return {
      target: quorum.url.split(','),
      nodes: quorum.nodes,
      isHealthy: () => all(quorum.nodes, redisIsUp),
      stop: quorum.stop,
    }
  },

  mongodb: async () => single(await startMongod(), isPrimary),
  'mongodb-replica-set': async () => single(await startMongod({ replicaSet: true }), isPrimary),
  postgres: async () => single(await startPostgres({ fsync: true }), isUp('postgres')),
  mysql: async () => single(await startMariadb({ fsync: true }), isUp('mysql')),
  etcd: async () => single(await startEtcd(), etcdIsUp),
  async zookeeper() {
    const settings = { maxSessionTimeout: 60_000 }
    const server = await startZookeeper({ options: ['-Dzookeeper.forceSync=yes'], settings })
    // A lease lasts for half of a session, and so outlasts the stalls.
    return single(server, zookeeperIsUp, { sessionTimeoutMs: 50_000 })
  },
}

export const KINDS = Object.keys(STORES)

/** Starts the servers of a store. */
export const startStore = (kind) => STORES[kind]()

/** A server has ended by itself. */
export class ServersEnded extends Error {}

/** Waits until the servers answer again. Resolves to that time (µs), from which recovery counts. */
export async function whenHealthy(store) {
  for (const deadline = Date.now() + HEALTHY_TIMEOUT_MS; ; await sleep(20)) {
    if (await store.isHealthy()) return Number(process.hrtime.bigint() / 1000n)
    if (Date.now() > deadline)
      throw new ServersEnded('the servers do not answer again: this is not a fault of holdfast')
  }
}

const seconds = (ms) => `${(ms / 1000).toFixed(1)} s`
const isMongodb = (kind) => kind.startsWith('mongodb')

/** Picks the servers that stall or are killed together: all that answer, one of several, or a majority. */
async function victims({ kind, store, pick }) {
  if (kind === 'redis-sentinel') return [await store.master()]
  if (kind === 'redis-quorum') return store.nodes.slice(0, pick([1, 2, 3]))
  return kind === 'redis-cluster' && pick([true, false]) ? [pick(store.nodes)] : store.nodes
}

const LARGEST_BURST = 20_000

async function burst(worker, count) {
  const { granted, ms } = await worker.ask('burst', { count })
  return `burst of ${count} free names: ${granted} granted and released in ${seconds(ms)}`
}

/** The first round: memory is compared from there on. */
export const WARM_UP = { run: ({ workers }) => burst(workers[0], LARGEST_BURST) }

/**
 * The faults. `of(kind)`: whether a store has it. `run(fixture)` causes it, and resolves to a description, or to
 * `{ done, healthyAt }` with the time at which the servers answered again. With `recovers`, grants must resume soon after that.
 * `forgetsReleases(kind)`: the crash may revert the latest releases.
 */
export const FAULTS = {
  nothing: {
    of: () => true,
    run: async ({ between }) => {
      await sleep(between(1000, 3000))
      return 'no fault'
    },
  },

  stall: {
    of: (kind) => kind !== 'memory' && kind !== 'sqlite',
    recovers: true,
    run: async (fixture) => {
      // Sentinels replace a master after two seconds.
      const ms = fixture.kind === 'redis-sentinel' ? fixture.between(300, 1500) : fixture.between(500, 12_000)
      const nodes = await victims(fixture)
      await Promise.all(nodes.map((node) => node.pause()))
      await sleep(ms)
      for (const node of nodes) node.resume()
      return `stall of ${nodes.length} of ${fixture.store.nodes.length} servers for ${seconds(ms)}`
    },
  },

  fsyncLock: {
    of: isMongodb,
    recovers: true,
    run: async ({ store: { nodes }, between }) => {
      const ms = between(3000, 12_000)
      await mongoCommand(nodes[0], { fsync: 1, lock: true })
      await sleep(ms)
      await mongoCommand(nodes[0], { fsyncUnlock: 1 })
      return `fsyncLock for ${seconds(ms)}`
    },
  },

  'write lock': {
    of: (kind) => kind === 'sqlite',
    recovers: true,
    run: async ({ store, between }) => {
      const ms = between(500, 12_000)
      const lock = await holdWriteLock(store.file)
      if (!lock) return 'write lock of another process: left out, there is no python3'
      await sleep(ms)
      await lock.end()
      return `write lock of another process for ${seconds(ms)}`
    },
  },

  'table lock': {
    of: (kind) => kind in SQL,
    recovers: true,
    run: ({ store, between }) =>
      sqlOf(store).connected(store.target, async (client) => {
        const ms = between(500, 12_000)
        await client.query(sqlOf(store).lock)
        await sleep(ms)
        await client.query(sqlOf(store).unlock)
        return `tables locked by another program for ${seconds(ms)}`
      }),
  },

  'connections ended': {
    of: (kind) => kind in SQL,
    recovers: true,
    run: ({ store, pick }) =>
      sqlOf(store).connected(store.target, async (client) => {
        const rounds = pick([1, 5, 20])
        for (let round = 0; round < rounds; round++) {
          await sqlOf(store).terminate(client)
          await sleep(100)
        }
        return `every connection ended by the server, ${rounds} times`
      }),
  },

  'server kill': {
    of: (kind) => kind !== 'memory' && kind !== 'sqlite',
    recovers: true,
    // A release on MongoDB does not wait for the journal: after a crash the name may be busy until its lease expires.
    // The same holds for PostgreSQL, where a release does not wait for the disk.
    forgetsReleases: (kind) => isMongodb(kind) || kind === 'postgres',
    run: async (fixture) => {
      const ms = fixture.between(0, 4000)
      const nodes = await victims(fixture)
      await Promise.all(nodes.map((node) => node.kill()))
      if (fixture.kind === 'redis-sentinel') {
        // The old master restarts after another one has been elected.
        const healthyAt = await whenHealthy(fixture.store)
        await Promise.all(nodes.map((node) => node.restart()))
        return { done: 'SIGKILL of the master, and a failover', healthyAt }
      }
      await sleep(ms)
      await Promise.all(nodes.map((node) => node.restart()))
      return `SIGKILL of ${nodes.length} of ${fixture.store.nodes.length} servers, down for ${seconds(ms)}`
    },
  },

  'worker kill': {
    of: (kind) => kind !== 'memory',
    run: async ({ workers, pick, between }) => {
      const count = pick([1, 2])
      for (let index = 0; index < count; index++) {
        // The first process lives through all rounds: its memory is compared.
        await pick(workers.slice(1)).replace()
        await sleep(between(0, 1000))
      }
      return `SIGKILL of ${count} processes`
    },
  },

  'worker stop': {
    of: (kind) => kind !== 'memory',
    run: async ({ workers, pick, between }) => {
      const [worker, ms] = [pick(workers), between(500, 8000)]
      worker.kill('SIGSTOP')
      await sleep(ms)
      worker.kill('SIGCONT')
      return `SIGSTOP of a process for ${seconds(ms)}`
    },
  },

  burst: {
    of: () => true,
    run: ({ workers, pick }) => burst(pick(workers), pick([1000, 5000, LARGEST_BURST])),
  },

  waiters: {
    of: () => true,
    run: async ({ workers }) => {
      const startedAt = Date.now()
      const results = await Promise.all(workers.map((worker) => worker.ask('waiters', { count: 1000, waitMs: 10_000 })))
      const granted = results.reduce((sum, result) => sum + result.granted, 0)
      return `${1000 * workers.length} waiters for one name: ${granted} granted in ${seconds(Date.now() - startedAt)}`
    },
  },

  'burst in a stall': {
    of: (kind) => kind !== 'memory' && kind !== 'sqlite',
    recovers: true,
    run: async (fixture) => {
      // The number of grants does not matter here. Each call must end within its limit.
      fixture.workers[0].ask('burst', { count: 5000 }).catch(() => {})
      const done = await FAULTS.stall.run(fixture)
      const healthyAt = await whenHealthy(fixture.store)
      return { done: `${done}, with a burst of 5000 free names`, healthyAt }
    },
  },
}

/** Starts another process that holds the write lock of a SQLite file; `undefined` where there is no Python. */
async function holdWriteLock(file) {
  const code = [
    'import sqlite3, sys',
    'db = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)',
    'db.execute("BEGIN IMMEDIATE")',
    'print("locked", flush=True)',
    'sys.stdin.readline()',
    'db.execute("COMMIT")',
  ]
  const child = spawn('python3', ['-c', code.join('\n'), file], { stdio: ['pipe', 'pipe', 'inherit'] })
  const ended = new Promise((resolve) => child.once('close', resolve).once('error', resolve))
  const line = new Promise((resolve) => createInterface({ input: child.stdout }).once('line', resolve))
  if ((await Promise.race([line, ended])) !== 'locked') return undefined
  return { end: () => (child.stdin.end('\n'), ended) }
}
