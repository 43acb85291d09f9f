// One name that many callers want: the time from a release to the next grant, the grants per second, and the commands per hand-off
// and while calls wait. Every contender has separate processes. The contenders run one after the other in several rounds, and the
// hand-offs of all rounds count together.
import { setTimeout as sleep } from 'node:timers/promises'
import { Monitor } from '../../scripts/monitor.mjs'
import { redisCommand } from '../../scripts/redis-command.mjs'
import { USUAL_MS } from '../poll.mjs'
import { median, percentile } from '../report.mjs'
import { HOLD, Waiters } from '../waiters.mjs'
import { delayed, etcd, mysql, onStore, postgres, redis, replicaSet, zookeeper } from './stores.mjs'

/** `retryMs`: the pause between two attempts; without it, the contender's default. 1 ms is the shortest timer in Node. */
const REDIS = [
  { name: 'holdfast', setting: 'default' },
  { name: 'redlock', setting: 'default: tries every 100 to 300 ms' },
  { name: 'redlock', setting: 'tries every 10 ms', retryMs: 10 },
  { name: 'redlock', setting: 'tries every ms', retryMs: 1 },
  { name: 'redlock-auto', setting: 'tries every ms', retryMs: 1 },
  { name: 'redis-semaphore', setting: 'default: tries every 10 ms' },
  { name: 'redis-semaphore', setting: 'tries every ms', retryMs: 1 },
  { name: 'redis-semaphore-auto', setting: 'tries every ms', retryMs: 1 },
  { name: 'verrou', setting: 'default: tries every 250 ms' },
  { name: 'verrou', setting: 'tries every ms', retryMs: 1 },
  { name: 'verrou-auto', setting: 'tries every ms', retryMs: 1 },
]

/**
 * The gist and mongodb-lock cannot wait, so users poll (see poll.mjs). locco has no default pause; this is the one in its
 * documentation.
 */
const MONGODB = [
  { name: 'holdfast', setting: 'default' },
  { name: 'gist', setting: `tries every ${USUAL_MS} ms` },
  { name: 'mongodb-lock', setting: `tries every ${USUAL_MS} ms` },
  { name: 'locco', setting: 'as documented: tries every 200 ms' },
]

const POSTGRES = [
  { name: 'holdfast', setting: 'default' },
  { name: 'advisory-locks', setting: 'waits in the server, with a connection' },
  { name: 'verrou-knex', setting: 'default: tries every 250 ms' },
  { name: 'verrou-knex', setting: 'tries every 10 ms', retryMs: 10 },
]

const MYSQL = [
  { name: 'holdfast', setting: 'default' },
  { name: 'get-lock', setting: 'waits in the server, with a connection' },
]

const ETCD = [
  { name: 'holdfast', setting: 'default' },
  { name: 'etcd3', setting: 'tries every 100 ms', retryMs: 100 },
  { name: 'etcd3', setting: 'tries every 10 ms', retryMs: 10 },
]

/** Commands that read, write or wait for data. Other commands of members, drivers and monitors are not counted. */
const COUNTED = 'aggregate delete find findAndModify getMore insert update commitTransaction abortTransaction'.split(
  ' ',
)

const COUNTED_STATEMENTS =
  'Every commit waits for the disk. Commands are statements, those of a transaction and its begin and commit included.'

const LOADS = [
  { title: '1 waiter', processes: 1, waiters: 1, isQuick: true },
  { title: '10 waiters in one process', processes: 1, waiters: 10 },
  { title: '100 waiters in one process', processes: 1, waiters: 100 },
  { title: '100 waiters in 4 processes', processes: 4, waiters: 100, isQuick: true },
  { title: '16 waiters in 16 processes', processes: 16, waiters: 16, isQuick: true },
]

/** How long each measurement takes. */
const timesOf = ({ quick, rounds }) => ({
  rounds: quick ? 1 : Math.min(rounds, 3),
  /** Hand-offs per round whose latency counts, and the limit for all of them. */
  handOffs: quick ? 3 : 200,
  longestMs: quick ? 3000 : 12_000,
  /** Hand-offs before, which do not count, and hand-offs afterwards, whose commands are counted. */
  warmUp: quick ? 1 : 20,
  counted: quick ? 3 : 50,
  contendMs: quick ? 300 : 2000,
  waitMs: quick ? 500 : 10_000,
  /** Time until all calls wait. */
  settleMs: quick ? 200 : 1000,
  /** Time for late messages of busy processes. */
  lateMs: quick ? 50 : 500,
  pings: quick ? 100 : 3000,
  pingsAfterPause: quick ? 20 : 500,
})

/** The least that a hand-off by the server can be: it compares, stores the next holder, and sends a message. */
const BARE_HAND_OFF = `if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', 30000)
  redis.call('PUBLISH', KEYS[1], ARGV[1])
end`

/** The round trip of Redis, a bare hand-off, and what its clients send. */
async function openRedis({ target, servers: [server] }) {
  const { Redis } = await import('ioredis')
  const [client, subscriber] = [new Redis(target.urls[0]), new Redis(target.urls[0])]
  await subscriber.subscribe('bare')
  client.defineCommand('handOff', { lua: BARE_HAND_OFF, numberOfKeys: 1 })
  return {
    probe: 'PING of ioredis',
    ping: () => client.ping(),
    bare: {
      column: 'in bare hand-offs',
      title: 'A bare hand-off',
      takes: 'takes',
      about:
        'a script of ioredis that compares, stores the next holder, and publishes a message to another connection of the process',
      prepare: () => client.set('bare', 'holder'),
      async handOff() {
        const message = new Promise((resolve) => subscriber.once('message', resolve))
        await /** @type {any} */ (client).handOff('bare', 'holder')
        await message
      },
    },
    reset: () => redisCommand(server.port, 'FLUSHALL'),
    async count() {
      const monitor = await Monitor.open(server.port)
      return async () => {
        monitor.close()
        return monitor.commands.length
      }
    },
    close() {
      client.disconnect()
      subscriber.disconnect()
    },
    counted:
      'Commands are those that clients send, including the one with which the last holder waits again. Commands inside ' +
      'scripts are not counted.',
  }
}

async function openMongodb({ target }) {
  const { MongoClient } = await import('mongodb')
  const client = await MongoClient.connect(target.urls[0])
  const admin = client.db('admin')
  const commands = async () => {
    const { metrics } = await admin.command({ serverStatus: 1 })
    return COUNTED.reduce((sum, name) => sum + Number(metrics.commands[name]?.total ?? 0), 0)
  }
  return {
    probe: 'ping of the official driver',
    ping: () => admin.command({ ping: 1 }),
    reset: () => client.db().dropDatabase(),
    async count() {
      const before = await commands()
      return async () => (await commands()) - before
    },
    close: () => client.close(),
    counted:
      'All write with `w=majority`; the replica set has one member, so nothing is replicated, and a majority is the journal of ' +
      'that member. Commands are those that read, write or wait for data, including the one with which the last holder waits again.',
  }
}

async function openPostgres({ target, probe }) {
  const { default: pg } = await import('pg')
  const client = new pg.Client({ connectionString: target.urls[0] })
  client.on('error', () => {})
  await client.connect()
  return {
    probe: '`SELECT 1` of `pg`',
    ping: () => client.query('SELECT 1'),
    bare: {
      column: 'in four round trips and a commit',
      title: 'Four round trips and a commit',
      takes: 'take',
      about: '`SELECT 1` of `pg`, four times in turn, and one `UPDATE` of a row',
      async prepare() {
        await client.query('CREATE TABLE IF NOT EXISTS bare (id integer PRIMARY KEY, value integer)')
        await client.query('INSERT INTO bare VALUES (1, 0) ON CONFLICT DO NOTHING')
      },
      async handOff() {
        for (let trip = 0; trip < 4; trip++) await client.query('SELECT 1')
        await client.query('UPDATE bare SET value = value + 1 WHERE id = 1')
      },
    },
    reset: async () => {
      const tables =
        "SELECT concat_ws('.', schemaname, tablename) AS name FROM pg_tables WHERE schemaname IN ('public', 'holdfast')"
      const { rows } = await client.query(tables)
      if (rows.length > 0) await client.query(`TRUNCATE ${rows.map(({ name }) => name).join()}`)
    },
    count: () => probe.count(),
    close: () => client.end(),
    counted: COUNTED_STATEMENTS,
  }
}

async function openMysql({ target, probe }) {
  const { default: driver } = await import('mysql2/promise')
  const connection = await driver.createConnection(target.urls[0])
  connection.on('error', () => {})
  return {
    probe: '`SELECT 1` of `mysql2`',
    ping: () => connection.query('SELECT 1'),
    reset: async () => {
      const [rows] = /** @type {any} */ (await connection.query('SHOW TABLES'))
      for (const row of rows) await connection.query(`TRUNCATE TABLE \`${Object.values(row)[0]}\``)
    },
    count: () => probe.count(),
    close: () => connection.end(),
    counted: COUNTED_STATEMENTS,
  }
}

const ZOOKEEPER = [
  { name: 'holdfast', setting: 'default' },
  { name: 'node-zookeeper-client', setting: 'watches the node before it' },
]

async function openZookeeper({ target, probe }) {
  const { connect } = await import('../contenders/node-zookeeper-client.mjs')
  const client = await connect(target, 'bare')
  return {
    probe: 'a creation and a deletion of `node-zookeeper-client`, which are two commits',
    ping: () => client.pair('ping'),
    reset: async () => {},
    count: () => probe.count(),
    close: async () => client.close(),
    counted: 'Every commit waits for the disk. Commands are packets that the server has received, pings included.',
  }
}

export async function handoffZookeeper(timing) {
  const lines = await measureStore(zookeeper, openZookeeper, ZOOKEEPER, timing)
  return { fields: [], names: namesOf(ZOOKEEPER, timing), markdown: lines.join('\n') }
}

async function openEtcd({ target, probe }) {
  const { Etcd3 } = await import('etcd3')
  const client = new Etcd3({ hosts: target.urls[0].replace('etcd://', 'http://') })
  return {
    probe: 'a put of `etcd3`, which is a commit',
    ping: () => client.put('bench/ping').value(''),
    reset: () => client.delete().all(),
    count: () => probe.count(),
    close: async () => client.close(),
    counted: 'Every commit waits for the disk. Commands are requests of gRPC.',
  }
}

/** The part on Redis: on loopback, and with one waiter on a link whose round trips take a millisecond longer. */
export async function handoff(timing) {
  const isQuick = (/** @type {any} */ { name, retryMs }) =>
    name === 'holdfast' || (retryMs === 1 && !name.endsWith('-auto'))
  const contenders = REDIS.filter((contender) => !timing.quick || isQuick(contender))
  const near = await measureStore(redis, openRedis, contenders, timing)
  const far = await measureStore(delayed(1), openRedis, contenders, timing, [
    { ...LOADS[0], title: '1 waiter, 1 ms more per round trip' },
  ])
  return { fields: [], names: namesOf(contenders, timing), markdown: [...near, ...far].join('\n') }
}

export async function handoffMongodb(timing) {
  const lines = await measureStore(replicaSet, openMongodb, MONGODB, timing)
  return { fields: [], names: namesOf(MONGODB, timing), markdown: lines.join('\n') }
}

export async function handoffPostgres(timing) {
  const lines = await measureStore(postgres, openPostgres, POSTGRES, timing)
  return { fields: [], names: namesOf(POSTGRES, timing), markdown: lines.join('\n') }
}

export async function handoffMysql(timing) {
  const lines = await measureStore(mysql, openMysql, MYSQL, timing)
  return { fields: [], names: namesOf(MYSQL, timing), markdown: lines.join('\n') }
}

export async function handoffEtcd(timing) {
  const lines = await measureStore(etcd, openEtcd, ETCD, timing)
  return { fields: [], names: namesOf(ETCD, timing), markdown: lines.join('\n') }
}

const namesOf = (contenders, { chosen }) => chosen([...new Set(contenders.map(({ name }) => name))])

/** Measures contenders on one store. Resolves to the lines of the report. With `link`, the loads are few and no calls only wait. */
async function measureStore(store, open, all, timing, link) {
  const { quick } = timing
  const times = timesOf(timing)
  const names = namesOf(all, timing)
  const contenders = all.filter(({ name }) => names.includes(name))
  const loads = link ?? LOADS.filter(({ isQuick }) => !quick || isQuick)
  return onStore(store, async ({ title, ...opened }) => {
    const server = await open(opened)
    const start = async (contender, processes) => {
      await server.reset()
      return Waiters.start(opened.target, contender, processes)
    }
    /** @type {{ busy: number[], idle: number[], bare: number[] }} */
    const trips = { busy: [], idle: [], bare: [] }
    const timeRoundTrips = async () => {
      trips.busy.push(await timed(server.ping, times.pings, false))
      trips.idle.push(await timed(server.ping, times.pingsAfterPause, true))
      if (!server.bare) return
      await server.bare.prepare()
      trips.bare.push(await timed(server.bare.handOff, times.pingsAfterPause, true))
    }
    await timeRoundTrips()
    /** @type {{ latencies: number[], commands: number[], grants: number[] }[][]} */
    const results = loads.map(() => contenders.map(() => ({ latencies: [], commands: [], grants: [] })))
    for (let round = 0; round < times.rounds; round++) {
      for (const [at, load] of loads.entries()) {
        // The order alternates from round to round: a drift of the machine affects all contenders equally.
        const order = [...contenders.keys()]
        for (const index of round % 2 === 0 ? order : order.reverse()) {
          const running = await start(contenders[index], load.processes)
          const { latencies, commands, grants } = await measure(running, server, load.waiters, times)
          results[at][index].latencies.push(...latencies)
          results[at][index].commands.push(commands)
          results[at][index].grants.push(grants)
        }
      }
      await timeRoundTrips()
    }
    const idle = []
    if (!link)
      for (const contender of contenders) idle.push(await countIdleCommands(await start(contender, 4), server, times))
    await server.close()
    const about = roundTrips(title, server, trips)
    const column = server.bare?.column
    if (link) return tables(loads, contenders, results, trips, column, [about, ''])
    return [
      ...intro(about, server, times),
      ...tables(loads, contenders, results, trips, column),
      ...idleTable(contenders, idle, times),
    ]
  })
}

/** Measures the median of `count` calls, one after the other, in µs. With `hasPause` there is a pause before each. */
async function timed(call, count, hasPause) {
  const times = []
  for (let at = 0; at < count; at++) {
    if (hasPause) await sleep(HOLD.leastMs)
    const start = performance.now()
    await call()
    times.push((performance.now() - start) * 1000)
  }
  return median(times)
}

async function measure(running, server, waiters, times) {
  const grants = await running.contend(Math.max(waiters, 2), times.contendMs)
  running.join(waiters + 1)
  await running.handOffs(times.warmUp + times.handOffs, times.longestMs)
  const latencies = await running.latencies(times.warmUp, times.lateMs)
  // Separate from the latencies: MONITOR makes a server slower.
  const counted = await server.count()
  const handOffs = await running.handOffs(times.counted, times.longestMs / 3)
  const commands = (await counted()) / handOffs
  await running.end()
  return { latencies, commands, grants }
}

/** Counts the commands while 100 waiters in 4 processes wait and no lock is released. */
async function countIdleCommands(running, server, times) {
  running.holdForEver()
  running.join(1)
  await running.handOffs(1, times.longestMs)
  running.join(100)
  await sleep(times.settleMs)
  const counted = await server.count()
  await sleep(times.waitMs)
  const commands = await counted()
  await running.end()
  return commands
}

const spread = (values) =>
  `${median(values).toFixed(0)} (${Math.min(...values).toFixed(0)}–${Math.max(...values).toFixed(0)})`
const ms = (microseconds) => (microseconds / 1000).toFixed(2)
const p99 = (values) =>
  percentile(
    [...values].sort((a, b) => a - b),
    0.99,
  )

const roundTrips = (title, { probe, bare }, trips) =>
  `${title} on loopback. A round trip (the median ${probe} in the same run) takes ${spread(trips.busy)} µs without pauses, and ` +
  `${spread(trips.idle)} µs after a pause of ${HOLD.leastMs} ms, like the one before each hand-off.` +
  (bare ? ` ${bare.title} (${bare.about}) ${bare.takes} ${spread(trips.bare)} µs after such a pause.` : '')

function intro(about, { counted }, { rounds, handOffs, longestMs, contendMs }) {
  return [
    about,
    '',
    'A hand-off is the time from the call of `release` until the next holder’s `acquire` has resolved, in any process. ' +
      `The lock is held for ${HOLD.leastMs} to ${HOLD.mostMs} ms, and the number of waiters is constant. ${rounds} rounds of up ` +
      `to ${handOffs} hand-offs or ${longestMs / 1000} s, interleaved. ${counted} All contenders wait without a timeout, ` +
      'whatever their default.',
    '',
    `Grants per second: as many callers, two at least, acquire and release the name again and again for ${contendMs / 1000} s, and ` +
      'hold it for one tick of the event loop. Callers that poll are not served in order: one that has just released the name often gets it again.',
    '',
  ]
}

function tables(loads, contenders, results, trips, column, note = []) {
  const [busy, idle] = [median(trips.busy), median(trips.idle)]
  const bare = trips.bare.length > 0 ? median(trips.bare) : undefined
  const row = (at) => (contender, index) => {
    const { latencies, commands, grants } = results[at][index]
    const mid = median(latencies)
    const figures = [
      latencies.length,
      ms(mid),
      ms(p99(latencies)),
      (mid / busy).toFixed(1),
      (mid / idle).toFixed(1),
      ...(bare ? [(mid / bare).toFixed(1)] : []),
      `${(mid / median(results[at][0].latencies)).toFixed(1)} ×`,
      median(commands).toFixed(1),
      median(grants).toFixed(0),
    ]
    return `| ${contender.name} | ${contender.setting} | ${figures.join(' | ')} |`
  }
  return loads.flatMap(({ title }, at) => [
    `## ${title}`,
    '',
    ...note,
    `| | setting | hand-offs | median, ms | p99, ms | in round trips | in round trips after a pause |${bare ? ` ${column} |` : ''} holdfast is faster | commands per hand-off | grants per second |`,
    `|---|---|${'---:|'.repeat(bare ? 9 : 8)}`,
    ...contenders.map(row(at)),
    '',
  ])
}

function idleTable(contenders, idle, { waitMs }) {
  return [
    `## 100 waiters in 4 processes that wait for ${waitMs / 1000} s`,
    '',
    '| | setting | commands | per process and second |',
    '|---|---|---:|---:|',
    ...contenders.map(
      ({ name, setting }, index) =>
        `| ${name} | ${setting} | ${idle[index]} | ${(idle[index] / 4 / (waitMs / 1000)).toFixed(2)} |`,
    ),
    '',
  ]
}
