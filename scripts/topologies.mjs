// Starts groups of servers for the tests: three independent Redis servers, a Redis Cluster of three masters, a Redis master with
// replicas and sentinels, and a MongoDB replica set of three members.
import { writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { redisCommand } from './redis-command.mjs'
import { locateRedis } from './servers-cli.mjs'
import { answersPing, freePort, importDriver, startServer, startMongod, startRedis } from './servers.mjs'

const SLOTS = 16384
const READY_TIMEOUT_MS = 60_000
/** The name by which the sentinels know the master. */
const MASTER = 'main'

/**
 * Starts three independent Redis servers. `url` is the list of their URLs, separated by commas.
 *
 * @typedef {import('./certificates.mjs').RedisTls} RedisTls
 * @param {{ args?: string[], tls?: RedisTls }} [options]
 */
export async function startRedisQuorum({ args = [], tls } = {}) {
  const nodes = await startAll([1, 2, 3].map(() => startRedis({ args, tls })))
  return { url: nodes.map((node) => node.url).join(','), nodes, stop: () => stopAll(nodes) }
}

/**
 * Starts a cluster of three masters that share the slots; with `replica` the fourth node is a replica of the first. With `tls`
 * the nodes use TLS among themselves and for clients, and `url` leads to these ports.
 *
 * @param {{ args?: string[], replica?: boolean, tls?: RedisTls }} [options]
 */
export async function startRedisCluster({ args = [], replica = false, tls } = {}) {
  const nodes = await startAll(Array.from({ length: replica ? 4 : 3 }, () => startNode(args, tls)))
  try {
    const [first, second, third, last] = nodes
    const masters = [first, second, third]
    await Promise.all(
      nodes.map(async ({ port }, index) => {
        const [from, to] = [index, index + 1].map((share) => Math.floor((SLOTS * share) / masters.length))
        await redisCommand(port, `CLUSTER SET-CONFIG-EPOCH ${index + 1}`)
        if (index < masters.length) await redisCommand(port, `CLUSTER ADDSLOTSRANGE ${from} ${to - 1}`)
        await redisCommand(port, `CLUSTER MEET 127.0.0.1 ${first.tlsPort || first.port} ${first.busPort}`)
      }),
    )
    await until('a cluster in the state ok', async () => {
      const states = await Promise.all(nodes.map(({ port }) => redisCommand(port, 'CLUSTER INFO')))
      return states.every(
        (state) => /cluster_state:ok/.test(state) && state.includes(`cluster_known_nodes:${nodes.length}\r\n`),
      )
    })
    if (last) {
      await redisCommand(last.port, `CLUSTER REPLICATE ${await nodeId(first)}`)
      await until('a replica that is up to date', async () =>
        /master_link_status:up/.test(await redisCommand(last.port, 'INFO replication')),
      )
    }
  } catch (error) {
    await stopAll(nodes)
    throw error
  }
  const seeds = nodes.map(({ port, tlsPort }) => `127.0.0.1:${tlsPort || port}`).join(',')
  return { url: `${tls ? 'rediss' : 'redis'}+cluster://${seeds}`, nodes, stop: () => stopAll(nodes) }
}

/** Resolves to the id of a node of a cluster. @param {{ port: number }} node */
export const nodeId = async ({ port }) => (await redisCommand(port, 'CLUSTER MYID')).split('\r\n')[1]

/** @param {string[]} args @param {RedisTls} [tls] */
async function startNode(args, tls) {
  const busPort = String(await freePort())
  const bus = ['--cluster-port', busPort, '--cluster-announce-ip', '127.0.0.1', '--cluster-announce-bus-port', busPort]
  const secure = tls ? ['--tls-cluster', 'yes', '--tls-replication', 'yes'] : []
  const node = await startRedis({
    args: ['--cluster-enabled', 'yes', '--cluster-node-timeout', '2000', ...bus, ...secure, ...args],
    tls,
  })
  return Object.assign(node, { busPort })
}

/**
 * Starts a master, two replicas and three sentinels, which replace a master that is silent for two seconds. `master()` resolves
 * to the server that the sentinels name. With `tls` all of them use TLS among themselves and for clients.
 *
 * @param {{ tls?: RedisTls }} [options]
 */
export async function startRedisSentinel({ tls } = {}) {
  /** @param {{ port: number, tlsPort: number }} server */
  const portOf = ({ port, tlsPort }) => tlsPort || port
  const replication = tls ? ['--tls-replication', 'yes'] : []
  const servers = [await startRedis({ args: replication, tls })]
  try {
    const [master] = servers
    const replica = [...replication, '--replicaof', '127.0.0.1', String(portOf(master))]
    servers.push(...(await startAll([1, 2].map(() => startRedis({ args: replica, tls })))))
    await until('online replicas', async () => {
      const info = await redisCommand(master.port, 'INFO replication')
      return [...info.matchAll(/^slave\d:.*state=online/gm)].length === 2
    })
    servers.push(...(await startAll([1, 2, 3].map(() => startSentinel(portOf(master), [], tls)))))
    const sentinels = servers.slice(3)
    await until('sentinels that know each other', async () => {
      const known = await Promise.all(sentinels.map(({ port }) => redisCommand(port, 'INFO sentinel')))
      return known.every((info) => info.includes('status=ok') && info.includes('slaves=2,sentinels=3'))
    })
    const hosts = sentinels.map((sentinel) => `127.0.0.1:${portOf(sentinel)}`)
    const url = `${tls ? 'rediss' : 'redis'}+sentinel://${hosts.join(',')}/${MASTER}`
    const currentMaster = async () => {
      const answer = await redisCommand(sentinels[0].port, `SENTINEL GET-MASTER-ADDR-BY-NAME ${MASTER}`)
      return servers.find((server) => answer.includes(`\r\n${portOf(server)}\r\n`))
    }
    return { url, servers: servers.slice(0, 3), sentinels, master: currentMaster, stop: () => stopAll(servers) }
  } catch (error) {
    await stopAll(servers)
    throw error
  }
}

/**
 * Starts one sentinel of a master.
 * @param {number} masterPort the port for TLS with `tls`
 * @param {string[]} [settings] more lines of its configuration
 * @param {RedisTls} [tls]
 */
export async function startSentinel(masterPort, settings = [], tls) {
  const path = await locateRedis()
  return startServer(async (dir, port) => {
    const file = join(dir, 'sentinel.conf')
    const tlsPort = tls ? await freePort() : 0
    const secure = tls ? [...tls.settings(tlsPort), ['tls-replication', 'yes']].map((setting) => setting.join(' ')) : []
    const lines = [
      `port ${port}`,
      'bind 127.0.0.1',
      ...secure,
      `sentinel monitor ${MASTER} 127.0.0.1 ${masterPort} 2`,
      // Longer than the second between two INFO requests: with less, a sentinel that has just received a new master considers it
      // down, and a second failover leaves two masters for ten seconds.
      `sentinel down-after-milliseconds ${MASTER} 2000`,
      `sentinel failover-timeout ${MASTER} 3000`,
      ...settings,
    ]
    await writeFile(file, `${lines.join('\n')}\n`)
    return {
      argv: [path, file, '--sentinel'],
      ready: async (log) => /\+monitor master/.test(log) && (await answersPing(port)),
      properties: { tlsPort },
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
 *
 * @typedef {Awaited<ReturnType<typeof startRedis>>} Server
 * @param {{ args?: string[] }} [options]
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
            .map((/** @type {{ stateStr: string }} */ { stateStr }) => stateStr)
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

/** @returns {import('mongodb').Document} */
const noAnswer = () => ({})

/** @param {Server[]} members */
async function primaryOf(members) {
  const answers = await Promise.all(members.map((member) => mongoCommand(member, { hello: 1 }, 1000).catch(noAnswer)))
  // A member that was paused considers itself the primary until it receives the result of the later election.
  /** @param {number} index */
  const election = (index) => answers[index].electionId.toHexString()
  const claiming = [0, 1, 2].filter((index) => answers[index].isWritablePrimary)
  return members[claiming.sort((one, other) => (election(one) < election(other) ? 1 : -1))[0]]
}

/**
 * Runs a command on the database `admin` of one member, primary or not. Resolves to the reply.
 *
 * @param {{ port: number }} member
 * @param {import('mongodb').Document} command
 */
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

/**
 * Polls `check` until it returns something truthy, and returns that. An error counts as falsy, and is the cause of the timeout.
 *
 * @template T
 * @param {string} what
 * @param {() => Promise<T>} check
 * @returns {Promise<Exclude<T, undefined | false>>}
 */
async function until(what, check) {
  const deadline = Date.now() + READY_TIMEOUT_MS
  for (;;) {
    let cause
    const value = await check().catch((error) => void (cause = error))
    if (value) return /** @type {any} */ (value)
    if (Date.now() > deadline) throw new Error(`not within ${READY_TIMEOUT_MS} ms: ${what}`, { cause })
    await sleep(50)
  }
}

/**
 * Starts all servers, or none.
 *
 * @template {{ stop: () => Promise<unknown> }} T
 * @param {Promise<T>[]} starting
 */
async function startAll(starting) {
  const results = await Promise.allSettled(starting)
  const failure = results.find((result) => result.status === 'rejected')
  const started = results.filter((result) => result.status === 'fulfilled').map((result) => result.value)
  if (!failure) return started
  await stopAll(started)
  throw failure.reason
}

/** @param {{ stop: () => Promise<unknown> }[]} servers */
const stopAll = (servers) => Promise.all(servers.map((server) => server.stop()))
