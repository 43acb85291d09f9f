// The stores of the benchmark, and the contenders on each of them.
import { startMongod, startRedis } from '../../scripts/servers.mjs'
import { MongoProbe, RedisProbe } from '../probes.mjs'
import { withMajority } from '../report.mjs'

export const REDIS = [
  'holdfast',
  'ioredis',
  'ioredis-auto',
  'node-redis',
  'valkey-glide',
  'redis-semaphore',
  'redis-semaphore-auto',
  'verrou',
  'verrou-auto',
  'redlock',
  'redlock-universal',
]
export const QUORUM = [
  'holdfast',
  'redlock',
  'redlock-auto',
  'redis-semaphore',
  'redis-semaphore-auto',
  'redlock-universal',
  'redlock-universal-auto',
]
/** Other calls of holdfast, for the pairs on Redis. */
export const CALLS = ['holdfast-using', 'holdfast-options', 'holdfast-new', 'holdfast-lock']
const MONGODB = ['holdfast', 'gist', 'mongodb-lock', 'now-upsert']

/** All contenders, in the order of the report. */
export const ALL = [...new Set([...REDIS, ...QUORUM, ...MONGODB, ...CALLS])]

export const redis = {
  contenders: REDIS,
  floor: 'ioredis',
  start: startRedis,
  open: (server) => RedisProbe.open(server),
}
const mongodb = { contenders: MONGODB, floor: 'gist', open: (server) => MongoProbe.open(server) }
export const mongodbs = [
  { ...mongodb, start: startMongod },
  { ...mongodb, start: () => startMongod({ replicaSet: true }), urlOf: withMajority },
]

/** Starts the store's server, runs `use` with it, a probe and its version, and stops it. */
export async function onServer({ start, open, urlOf = (url) => url }, use) {
  const server = await start()
  try {
    const probe = await open(server)
    const result = await use({ server, url: urlOf(server.url), probe, version: await probe.version() })
    await probe.close()
    return result
  } finally {
    await server.stop()
  }
}
