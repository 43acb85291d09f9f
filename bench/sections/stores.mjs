// The stores of the benchmark, and the contenders on each of them.
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { certify, makeAuthority } from '../../scripts/certificates.mjs'
import { startEtcd } from '../../scripts/etcd.mjs'
import { startMariadb } from '../../scripts/mysql.mjs'
import { startPostgres } from '../../scripts/postgres.mjs'
import { freePort, startMongod, startRedis } from '../../scripts/servers.mjs'
import { startMongoReplicaSet, startRedisCluster, startRedisSentinel } from '../../scripts/topologies.mjs'
import { openDelayProxy } from '../delay-proxy.mjs'
import { EtcdProbe } from '../etcd-probe.mjs'
import { startZookeeper } from '../../scripts/zookeeper.mjs'
import { ZookeeperProbe } from '../zookeeper-probe.mjs'
import { MysqlProbe } from '../mysql-probe.mjs'
import { COUNTING, PostgresProbe } from '../postgres-probe.mjs'
import { MongoProbe, RedisProbe } from '../probes.mjs'

/** Clients and libraries on ioredis, each with both settings of it. */
const bothSettings = (...names) => names.flatMap((name) => [name, `${name}-auto`])
const IOREDIS = bothSettings('ioredis', 'redis-semaphore', 'verrou', 'redlock', 'redlock-universal')
const REDIS = ['holdfast', ...IOREDIS, 'node-redis', 'valkey-glide']
const TRANSPORT = ['holdfast', 'holdfast-using', 'holdfast-lock', ...IOREDIS]
const QUORUM = ['holdfast', ...bothSettings('redlock', 'redis-semaphore', 'redlock-universal')]
/** Other calls of holdfast, for the pairs on Redis. */
const CALLS = ['holdfast-using', 'holdfast-observed', 'holdfast-options', 'holdfast-new', 'holdfast-lock']
const MONGODB = ['holdfast', 'gist', 'mongodb-lock', 'now-upsert']

/** The contenders of the calls, in the order of the report. */
export const ALL = [...new Set([...REDIS, ...QUORUM, ...MONGODB, ...CALLS])]

const stopAll = (parts) => Promise.all(parts.map((part) => part.stop()))
const targetOf = (...servers) => ({ urls: servers.map(({ url }) => url) })
const withMajority = (url) => `${url}${url.includes('?') ? '&' : '?'}w=majority`

const redisStore = {
  contenders: REDIS,
  floor: 'ioredis',
  open: (servers) => RedisProbe.open(...servers),
  async start() {
    const server = await startRedis()
    return { target: targetOf(server), servers: [server], stop: () => server.stop() }
  },
}
/** One Redis, for all calls or for the pairs. */
export const redis = redisStore
export const redisPairs = { ...redisStore, contenders: [...REDIS, ...CALLS] }

/** One Redis through a proxy, whose round trips take longer. */
export const delayed = (extraMs) => ({
  ...redisStore,
  label: `, ${extraMs} ms more per round trip`,
  async start() {
    const server = await startRedis()
    const proxy = await openDelayProxy(server, extraMs)
    const before = await proxy.tripMs()
    return {
      target: targetOf(proxy),
      servers: [server],
      note: async () =>
        `A PING through this proxy takes ${before.toFixed(2)} ms before the part and ${(await proxy.tripMs()).toFixed(2)} ms ` +
        `after it, and ${proxy.bareMs.toFixed(2)} ms without the proxy.`,
      stop: async () => {
        await proxy.close()
        await server.stop()
      },
    }
  },
})

/** Starts a server with a certificate. `start`: gets its files, and resolves to the server and the URL for TLS. */
async function startWithTls(start) {
  const folder = await mkdtemp(join(tmpdir(), 'holdfast-bench-'))
  const caFile = await makeAuthority(folder)
  const { server, url } = await start({ ...(await certify(folder, 'server')), ca: caFile })
  const stop = async () => {
    await server.stop()
    await rm(folder, { recursive: true })
  }
  return { target: { urls: [url], caFile }, servers: [server], stop }
}

/** One Redis with TLS. Its port without TLS is for the measurement only. */
export const tls = {
  ...redisStore,
  contenders: TRANSPORT,
  label: ', TLS',
  start: () =>
    startWithTls(async ({ cert, key, ca }) => {
      const port = await freePort()
      const files = ['--tls-cert-file', cert, '--tls-key-file', key, '--tls-ca-cert-file', ca]
      const server = await startRedis({ args: ['--tls-port', String(port), ...files, '--tls-auth-clients', 'no'] })
      return { server, url: `rediss://127.0.0.1:${port}` }
    }),
}

/** Without redlock-universal, which loads its script on one node, and whose release fails on each other one. */
export const cluster = {
  ...redisStore,
  contenders: TRANSPORT.filter((name) => !name.startsWith('redlock-universal')),
  label: ', Cluster of three masters',
  async start() {
    const group = await startRedisCluster()
    return { target: targetOf(group), servers: group.nodes, stop: group.stop }
  },
}

export const sentinel = {
  ...redisStore,
  contenders: TRANSPORT,
  label: ', Sentinel',
  async start() {
    const group = await startRedisSentinel()
    return { target: targetOf(group), servers: [await group.master()], stop: group.stop }
  },
}

/** A quorum of independent Redis servers. */
export const quorum = (size) => ({
  contenders: QUORUM,
  open: redisStore.open,
  title: (version) => `quorum of ${size} × ${version}`,
  async start() {
    const servers = await Promise.all(Array.from({ length: size }, () => startRedis()))
    return { target: targetOf(...servers), servers, stop: () => stopAll(servers) }
  },
})

/** A standalone MongoDB, or a replica set of one or three members. */
const mongodb = (members) => ({
  contenders: MONGODB,
  floor: 'gist',
  open: ([server]) => MongoProbe.open(server),
  async start() {
    const server = members === 3 ? await startMongoReplicaSet() : await startMongod({ replicaSet: members === 1 })
    const url = members > 0 ? withMajority(server.url) : server.url
    return { target: { urls: [url] }, servers: [server], stop: () => server.stop() }
  },
})
export const replicaSet = mongodb(1)
/** All of them, for all calls or for the pairs. */
export const mongodbs = [mongodb(0), replicaSet, mongodb(3)]
export const mongodbPairs = mongodbs.map((store) => ({ ...store, contenders: [...MONGODB, 'holdfast-lock'] }))

/** A PostgreSQL whose commits wait for the disk. */
export const postgres = {
  contenders: [
    'holdfast',
    'holdfast-using',
    'holdfast-lock',
    'verrou-knex',
    'advisory-locks',
    'advisory-pipelined',
    'bare-commits',
  ],
  floor: 'advisory-locks',
  shares: true,
  open: ([server]) => PostgresProbe.open(server),
  async start() {
    const server = await startPostgres({ fsync: true, settings: COUNTING })
    return { target: targetOf(server), servers: [server], stop: () => server.stop() }
  },
}

/** The same with TLS. The measurement uses none. */
export const postgresTls = {
  ...postgres,
  contenders: ['holdfast', 'holdfast-using', 'verrou-knex', 'advisory-locks'],
  label: ', TLS',
  start: () =>
    startWithTls(async ({ cert, key, ca }) => {
      const server = await startPostgres({ fsync: true, settings: COUNTING, tls: { cert, key, ca } })
      return { server, url: server.url }
    }),
}

/** A MariaDB whose commits wait for the disk. */
export const mysql = {
  contenders: ['holdfast', 'holdfast-using', 'holdfast-lock', 'get-lock', 'bare-commits'],
  floor: 'get-lock',
  shares: true,
  open: ([server]) => MysqlProbe.open(server),
  async start() {
    const server = await startMariadb({ fsync: true })
    return { target: targetOf(server), servers: [server], stop: () => server.stop() }
  },
}

/** The same with TLS. The measurement uses none. */
export const mysqlTls = {
  ...mysql,
  contenders: ['holdfast', 'holdfast-using', 'get-lock'],
  label: ', TLS',
  start: () =>
    startWithTls(async ({ cert, key, ca }) => {
      const server = await startMariadb({ fsync: true, tls: { cert, key, ca } })
      return { server, url: server.url }
    }),
}

/** A ZooKeeper server whose commits wait for the disk. */
export const zookeeper = {
  contenders: ['holdfast', 'holdfast-using', 'holdfast-lock', 'node-zookeeper-client', 'node-zookeeper-client-bare'],
  floor: 'node-zookeeper-client-bare',
  shares: true,
  open: async ([server]) => new ZookeeperProbe(server),
  async start() {
    const options = ['-Dzookeeper.forceSync=yes', '-XX:TieredStopAtLevel=4', '-Xmx512m']
    const server = await startZookeeper({ options })
    return { target: targetOf(server), servers: [server], stop: () => server.stop() }
  },
}

/** An etcd server whose commits wait for the disk. */
export const etcd = {
  contenders: ['holdfast', 'holdfast-using', 'holdfast-lock', 'etcd3', 'etcd3-bare'],
  floor: 'etcd3-bare',
  shares: true,
  open: async ([server]) => new EtcdProbe(server),
  async start() {
    const server = await startEtcd()
    return { target: targetOf(server), servers: [server], stop: () => server.stop() }
  },
}

/** Opens the probe of a store in the processes themselves: there is no server that counts. */
const openNoProbe = async () => ({
  start: async () => async () => ({ cpuUs: 0 }),
  requests: async (run) => Math.min(await run(), 1),
  version: () => 'in the process',
  close() {},
})
export const memory = {
  open: openNoProbe,
  start: async () => ({ target: { urls: ['memory:'] }, servers: [], stop: async () => {} }),
}
/** A file that the processes of a machine share. */
export const sqlite = {
  open: openNoProbe,
  async start() {
    const folder = await mkdtemp(join(tmpdir(), 'holdfast-bench-'))
    const target = { urls: [`sqlite:${join(folder, 'locks.db')}`] }
    return { target, servers: [], stop: () => rm(folder, { recursive: true }) }
  },
}

/** Starts the servers of a store, runs `use` with their target, a probe and their title, and stops them. */
export async function onStore({ start, open, label = '', title = (version) => `${version}${label}` }, use) {
  const { target, servers, note, stop } = await start()
  try {
    const probe = await open(servers)
    const result = await use({ target, servers, probe, note, title: title(await probe.version()) })
    await probe.close()
    return result
  } finally {
    await stop()
  }
}
