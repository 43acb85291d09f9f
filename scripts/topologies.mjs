// Starts groups of servers for the tests: a Redis Cluster of three masters, a Redis master with replicas and sentinels, and a
// MongoDB replica set of three members.
import { writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { redisCommand } from './redis-command.mjs'
import { locateRedis } from './servers-cli.mjs'
import { freePort, importDriver, startServer, startMongod, startRedis } from './servers.mjs'

const SLOTS = 16384
const READY_TIMEOUT_MS = 60_000
/** The name by which the sentinels know the master. */
const MASTER = 'main'

/** Starts a cluster of three masters that share the slots. */
export async function startRedisCluster({ args = [] } = {}) {
  const nodes = await startAll([0, 1, 2].map(() => startNode(args)))
  try {
    const [first] = nodes
    await Promise.all(
      nodes.map(async ({ port }, index) => {
        const [from, to] = [index, index + 1].map((share) => Math.floor((SLOTS * share) / nodes.length))
        await redisCommand(port, `CLUSTER SET-CONFIG-EPOCH ${index + 1}`)
        await redisCommand(port, `CLUSTER ADDSLOTSRANGE ${from} ${to - 1}`)
        await redisCommand(port, `CLUSTER MEET 127.0.0.1 ${first.port} ${first.busPort}`)
      }),
    )
    await until('a cluster in the state ok', async () => {
      const states = await Promise.all(nodes.map(({ port }) => redisCommand(port, 'CLUSTER INFO')))
      return states.every(
        (state) => /cluster_state:ok/.test(state) && state.includes(`cluster_known_nodes:${nodes.length}\r\n`),
      )
    })
  } catch (error) {
    await stopAll(nodes)
    throw error
  }
  const url = `redis+cluster://${nodes.map(({ port }) => `127.0.0.1:${port}`).join(',')}`
  return { url, nodes, stop: () => stopAll(nodes) }
}

async function startNode(args) {
  const busPort = await freePort()
  const bus = ['--cluster-port', busPort, '--cluster-announce-ip', '127.0.0.1', '--cluster-announce-bus-port', busPort]
  const node = await startRedis({
    args: ['--cluster-enabled', 'yes', '--cluster-node-timeout', '2000', ...bus, ...args],
  })
  return Object.assign(node, { busPort })
}

/**
 * Starts a master, two replicas and three sentinels, which replace a master that is silent for two seconds. `master()` resolves
 * to the server that the sentinels name.
 */
export async function startRedisSentinel() {
  const servers = [await startRedis()]
  try {
    const [master] = servers
    servers.push(...(await startAll([1, 2].map(() => startRedis({ args: ['--replicaof', '127.0.0.1', master.port] })))))
    await until('online replicas', async () => {
      const info = await redisCommand(master.port, 'INFO replication')
      return [...info.matchAll(/^slave\d:.*state=online/gm)].length === 2
    })
    servers.push(...(await startAll([1, 2, 3].map(() => startSentinel(master.port)))))
    const sentinels = servers.slice(3)
    await until('sentinels that know each other', async () => {
      const known = await Promise.all(sentinels.map(({ port }) => redisCommand(port, 'INFO sentinel')))
      return known.every((info) => info.includes('status=ok') && info.includes('slaves=2,sentinels=3'))
    })
    const url = `redis+sentinel://${sentinels.map(({ port }) => `127.0.0.1:${port}`).join(',')}/${MASTER}`
    const currentMaster = async () => {
      const answer = await redisCommand(sentinels[0].port, `SENTINEL GET-MASTER-ADDR-BY-NAME ${MASTER}`)
      return servers.find(({ port }) => answer.includes(`\r\n${port}\r\n`))
    }
    return { url, servers: servers.slice(0, 3), sentinels, master: currentMaster, stop: () => stopAll(servers) }
  } catch (error) {
    await stopAll(servers)
    throw error
  }
}

async function startSentinel(masterPort) {
  const { path, env } = await locateRedis()
  return startServer(async (dir, port) => {
    const file = join(dir, 'sentinel.conf')
    const lines = [
      `port ${port}`,
      'bind 127.0.0.1',
      `sentinel monitor ${MASTER} 127.0.0.1 ${masterPort} 2`,
      // Longer than the second between two INFO requests: with less, a sentinel that has just received a new master considers it
      // down, and a second failover leaves two masters for ten seconds.
      `sentinel down-after-milliseconds ${MASTER} 2000`,
      `sentinel failover-timeout ${MASTER} 3000`,
    ]
    await writeFile(file, `${lines.join('\n')}\n`)
    const isUp = () =>
      redisCommand(port, 'PING').then(
        (answer) => answer === '+PONG\r\n',
        () => false,
      )
    return {
      argv: [path, file, '--sentinel'],
      env,
      ready: async (log) => /\+monitor master/.test(log) && isUp(),
      properties: {},
    }
  })
}

/** Settings for short elections: an election starts after 1.5 s without a heartbeat of the primary. */
const ELECTIONS = {
  electionTimeoutMillis: 1500,
  heartbeatIntervalMillis: 500,
  // Limits for a new primary that waits for heartbeats and for missing writes of a hanging member.
  heartbeatTimeoutSecs: 2,
  catchUpTimeoutMillis: 2000,
}

/**
 * Settings for replication from a hanging member: it ends once, after its heartbeats have failed. With more retries the member
 * would wait for half a minute, and a majority of two acknowledges no write in this time although they have a primary.
 */
const REPLICATION = ['oplogNetworkTimeoutBufferSeconds=4', 'oplogFetcherSteadyStateMaxFetcherRestarts=0']

/**
 * Starts the replica set `rs0` of three members, which elect a new primary within seconds.
 * - `members`: the three servers.
 * - `primary()`: resolves to the primary of the latest election; to `undefined` while there is none.
 * - `stepDown({ seconds, force })`: the primary steps down, and is not elected again for this time. It proposes a successor, which
 *   is elected at once; with `force` the others start an election after their timeout. Resolves to the old primary.
 * - `ready()`: resolves when one member is the primary and the others are secondaries.
 */
export async function startMongoReplicaSet({ args = [] } = {}) {
  const replication = REPLICATION.flatMap((parameter) => ['--setParameter', parameter])
  const start = () => startMongod({ replicaSet: true, initiate: false, args: [...replication, ...args] })
  const members = await startAll([start(), start(), start()])
  const hosts = members.map(({ port }) => `127.0.0.1:${port}`)
  const set = {
    url: `mongodb://${hosts.join(',')}/holdfast?replicaSet=rs0`,
    members,
    primary: () => primaryOf(members),
    stepDown: ({ seconds = 1, force = false } = {}) =>
      until('a primary that steps down', async () => {
        const primary = await set.primary()
        const command = {
          replSetStepDown: seconds,
          secondaryCatchUpPeriodSecs: force ? 0 : Math.min(seconds, 1),
          force,
        }
        // It fails when the member is not the primary any more, or no member has caught up yet.
        return (
          primary &&
          mongoCommand(primary, command).then(
            () => primary,
            () => undefined,
          )
        )
      }),
    ready: () =>
      until('a replica set with all members', async () => {
        const primary = await set.primary()
        const states = primary && (await mongoCommand(primary, { replSetGetStatus: 1 }).catch(() => undefined))
        return (
          states?.members
            .map(({ stateStr }) => stateStr)
            .sort()
            .join() === 'PRIMARY,SECONDARY,SECONDARY'
        )
      }),
    stop: () => stopAll(members),
  }
  try {
    const config = { _id: 'rs0', members: hosts.map((host, _id) => ({ _id, host })), settings: ELECTIONS }
    await mongoCommand(members[0], { replSetInitiate: config }, READY_TIMEOUT_MS)
    await set.ready()
    return set
  } catch (error) {
    await set.stop()
    throw error
  }
}

async function primaryOf(members) {
  const answers = await Promise.all(members.map((member) => mongoCommand(member, { hello: 1 }, 1000).catch(() => ({}))))
  // A member that was paused considers itself the primary until it receives the result of the later election.
  const election = (index) => answers[index].electionId.toHexString()
  const claiming = [0, 1, 2].filter((index) => answers[index].isWritablePrimary)
  return members[claiming.sort((one, other) => (election(one) < election(other) ? 1 : -1))[0]]
}

/** Runs a command on the database `admin` of one member, primary or not. Resolves to the reply. */
export async function mongoCommand({ port }, command, limitMs = 5000) {
  const { MongoClient } = await importDriver()
  const limits = { serverSelectionTimeoutMS: limitMs, connectTimeoutMS: limitMs, socketTimeoutMS: limitMs }
  const client = new MongoClient(`mongodb://127.0.0.1:${port}/?directConnection=true`, limits)
  try {
    return await client.db('admin').command(command)
  } finally {
    await client.close()
  }
}

/** Polls `check` until it returns something truthy, and returns that. An error counts as falsy, and is the cause of the timeout. */
async function until(what, check) {
  const deadline = Date.now() + READY_TIMEOUT_MS
  for (;;) {
    let cause
    const value = await check().catch((error) => void (cause = error))
    if (value) return value
    if (Date.now() > deadline) throw new Error(`not within ${READY_TIMEOUT_MS} ms: ${what}`, { cause })
    await sleep(50)
  }
}

/** Starts all servers, or none. */
async function startAll(starting) {
  const results = await Promise.allSettled(starting)
  const failure = results.find((result) => result.status === 'rejected')
  const started = results.filter((result) => result.status === 'fulfilled').map((result) => result.value)
  if (!failure) return started
  await stopAll(started)
  throw failure.reason
}

const stopAll = (servers) => Promise.all(servers.map((server) => server.stop()))
