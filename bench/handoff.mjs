// How long it takes from a release until the next one has the lock, and what that and the waiting cost the server. Every
// contender has processes of its own, one contender after the other, several rounds, all rounds' hand-offs together.
//
//   npm run bench:handoff               writes bench/results-handoff.md
//   npm run bench:handoff -- --quick    a smoke test: that every contender works, not how fast
//
// An addon that is named in NAPI_RS_NATIVE_LIBRARY_PATH is taken as it is.
import { fork } from 'node:child_process'
import { writeFileSync } from 'node:fs'
import { cpus } from 'node:os'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { Monitor } from '../scripts/monitor.mjs'
import { startRedis } from '../scripts/servers.mjs'
import { installDependencies } from '../scripts/setup.mjs'
import { releaseBuild } from './build.mjs'
import { contenderVersions, median, serverVersion } from './report.mjs'

const quick = process.argv.includes('--quick')
const ROUNDS = quick ? 1 : 3
/** Hand-offs per round whose latency counts, and the longest that they may take together. */
const HANDOFFS = quick ? 5 : 200
const LONGEST_MS = quick ? 3000 : 12_000
/** Hand-offs before, which do not count, and after, whose commands are counted. */
const WARM_UP = quick ? 1 : 20
const COUNTED = quick ? 5 : 50
const WAIT_MS = quick ? 500 : 10_000
/** For how long a lock is held. */
const HOLD = { leastMs: 4, mostMs: 8 }
const FOR_EVER = { leastMs: 600_000, mostMs: 600_000 }

/** `retryMs`: the pause between two tries; without it, the contender's own. A timer of Node does not know less than 1 ms. */
const CONTENDERS = [
  { module: 'holdfast', setting: 'default' },
  { module: 'redlock', setting: 'default: tries every 100 to 300 ms' },
  { module: 'redlock', setting: 'tries every 10 ms', retryMs: 10 },
  { module: 'redlock', setting: 'tries every ms', retryMs: 1 },
  { module: 'redis-semaphore', setting: 'default: tries every 10 ms' },
  { module: 'redis-semaphore', setting: 'tries every ms', retryMs: 1 },
  { module: 'verrou', setting: 'default: tries every 250 ms' },
  { module: 'verrou', setting: 'tries every ms', retryMs: 1 },
].filter(({ module, retryMs }) => !quick || module === 'holdfast' || retryMs === 1)
const CROWDS = [
  { title: '1 waiter', processes: 1, waiters: 1 },
  { title: '10 waiters in one process', processes: 1, waiters: 10 },
  { title: '100 waiters in one process', processes: 1, waiters: 100 },
  { title: '100 waiters in 4 processes', processes: 4, waiters: 100 },
].filter(({ waiters, processes }) => !quick || waiters === 1 || processes > 1)

installDependencies()
installDependencies('bench')
// What lies beside index.js may be a debug build: figures come from a release build, whatever is there.
if (!quick) process.env.NAPI_RS_NATIVE_LIBRARY_PATH ??= releaseBuild()
const { default: Redis } = await import('ioredis')

const server = await startRedis()
const redis = new Redis(server.url)

/** The median of many round trips, one after the other, in µs; with a pause before each, as before each hand-off, if so told. */
async function roundTrip(count, pauses) {
  const times = []
  for (let ping = 0; ping < count; ping++) {
    if (pauses) await sleep(HOLD.leastMs)
    const start = performance.now()
    await redis.ping()
    times.push((performance.now() - start) * 1000)
  }
  return median(times)
}

/** Processes of one contender whose waiters get the lock one after the other. */
class Crowd {
  #children
  #isOver = false
  got = []
  releasing = []

  static async start({ module, retryMs }, count) {
    await redis.flushall()
    const crowd = new Crowd()
    const script = fileURLToPath(new URL('waiter.mjs', import.meta.url))
    crowd.#children = Array.from({ length: count }, () => fork(script, [module, server.url, `${retryMs ?? ''}`]))
    await Promise.all(
      crowd.#children.map(
        (child) => new Promise((ready, failed) => child.once('message', ready).once('exit', (code) => failed(new Error(`${module} ended with ${code}`)))),
      ),
    )
    for (const child of crowd.#children) {
      child.removeAllListeners('exit').on('message', ({ got, releasing }) => crowd.#hear(child, got, releasing))
      child.on('exit', () => crowd.#isOver || console.error(`a process of ${module} has ended`))
    }
    return crowd
  }

  /** Whose release it was waits again once somebody else has the lock, so that as many wait at each hand-off. */
  #hear(child, got, releasing) {
    if (got) {
      this.got.push(got)
      this.#again?.send(HOLD)
      this.#again = undefined
    } else {
      this.releasing.push(releasing)
      if (this.got.length > this.releasing.length) child.send(HOLD)
      else this.#again = child
    }
  }

  #again

  join(count, hold = HOLD) {
    for (let index = 0; index < count; index++) this.#children[index % this.#children.length].send(hold)
  }

  /** Waits for so many more hand-offs, but not too long. Gives how many there were. */
  async handOffs(count, longestMs = LONGEST_MS) {
    const [before, end] = [this.got.length, performance.now() + longestMs]
    while (this.got.length < before + count && performance.now() < end) await sleep(2)
    return this.got.length - before
  }

  /** From each release to the next grant, in µs, but for the first ones. */
  async latencies() {
    const latest = Math.max(...this.got)
    // A busy process tells late, and is not to be left out.
    await sleep(quick ? 50 : 500)
    const events = [...this.got.map((at) => ({ at })), ...this.releasing.map((at) => ({ at, isRelease: true }))]
    const ordered = events.filter(({ at }) => at <= latest).sort((one, other) => one.at - other.at)
    const pairs = ordered.slice(1).map((event, index) => [ordered[index], event])
    return pairs.filter(([before, after]) => before.isRelease && !after.isRelease).map(([before, after]) => after.at - before.at).slice(WARM_UP)
  }

  async end() {
    this.#isOver = true
    await Promise.all(
      this.#children.map((child) => new Promise((ended) => child.once('exit', ended).kill('SIGKILL'))),
    )
  }
}

async function measure(contender, { processes, waiters }) {
  const crowd = await Crowd.start(contender, processes)
  crowd.join(waiters + 1)
  await crowd.handOffs(WARM_UP + HANDOFFS)
  const latencies = await crowd.latencies()
  // Apart from the latencies: a server that tells of every command is a slower one.
  const monitor = await Monitor.open(server.port)
  const handOffs = await crowd.handOffs(COUNTED, LONGEST_MS / 3)
  const commands = monitor.commands.length / handOffs
  monitor.close()
  await crowd.end()
  return { latencies, commands }
}

/** Commands while 100 waiters of 4 processes wait, and nothing happens. */
async function watch(contender) {
  const crowd = await Crowd.start(contender, 4)
  crowd.join(1, FOR_EVER)
  await crowd.handOffs(1)
  crowd.join(100)
  await sleep(1000)
  const monitor = await Monitor.open(server.port)
  await sleep(WAIT_MS)
  const commands = monitor.commands.length
  monitor.close()
  await crowd.end()
  return commands
}

const trips = { busy: [], idle: [] }
async function timeRoundTrips() {
  trips.busy.push(await roundTrip(quick ? 100 : 3000, false))
  trips.idle.push(await roundTrip(quick ? 20 : 500, true))
}
await timeRoundTrips()
const results = CROWDS.map(() => CONTENDERS.map(() => ({ latencies: [], commands: [] })))
for (let round = 0; round < ROUNDS; round++) {
  for (const [at, crowd] of CROWDS.entries()) {
    // Whoever goes first in a round goes last in the next: a drift of the machine hits all alike.
    const order = [...CONTENDERS.keys()]
    for (const index of round % 2 === 0 ? order : order.reverse()) {
      const { latencies, commands } = await measure(CONTENDERS[index], crowd)
      results[at][index].latencies.push(...latencies)
      results[at][index].commands.push(commands)
    }
  }
  await timeRoundTrips()
}
const watched = []
for (const contender of CONTENDERS) watched.push(await watch(contender))
const [busy, idle] = [median(trips.busy), median(trips.idle)]

const spread = (values) => `${median(values).toFixed(0)} (${Math.min(...values).toFixed(0)}–${Math.max(...values).toFixed(0)})`
const ms = (microseconds) => (microseconds / 1000).toFixed(2)
const p99 = (values) => [...values].sort((a, b) => a - b)[Math.ceil(values.length * 0.99) - 1]

function table(crowd, rows) {
  const own = median(rows[0].latencies)
  return [
    `## ${crowd.title}`,
    '',
    '| | setting | hand-offs | median, ms | p99, ms | in round trips | in round trips after a pause | holdfast is faster | commands per hand-off |',
    '|---|---|---:|---:|---:|---:|---:|---:|---:|',
    ...rows.map(({ latencies, commands }, index) => {
      const { module, setting } = CONTENDERS[index]
      const mid = median(latencies)
      const figures = [latencies.length, ms(mid), ms(p99(latencies)), (mid / busy).toFixed(1), (mid / idle).toFixed(1), `${(mid / own).toFixed(1)} ×`, median(commands).toFixed(1)]
      return `| ${module} | ${setting} | ${figures.join(' | ')} |`
    }),
    '',
  ]
}

const report = [
  '# Hand-offs',
  '',
  `${cpus().length} × ${cpus()[0].model}, Node ${process.version}, ${await serverVersion('redis', server.url)} on loopback. ` +
    `A round trip, the median PING of ioredis in the same run, takes ${spread(trips.busy)} µs where one follows the other, and ` +
    `${spread(trips.idle)} µs after a pause of ${HOLD.leastMs} ms, as there is before each hand-off.`,
  '',
  'A hand-off is the time from the call of `release` until the next holder’s `acquire` has resolved, in whichever process. ' +
    `The lock is held for ${HOLD.leastMs} to ${HOLD.mostMs} ms, and as many wait at each hand-off. ${ROUNDS} rounds of up to ` +
    `${HANDOFFS} hand-offs or ${LONGEST_MS / 1000} s, interleaved. Commands are those that clients send; the one with which the last holder waits again is among them, and what scripts do is ` +
    'not counted. All contenders wait for as long as it takes, whatever their default.',
  '',
  `Versions: ${contenderVersions()}.`,
  '',
  ...CROWDS.flatMap((crowd, at) => table(crowd, results[at])),
  `## 100 waiters in 4 processes that wait for ${WAIT_MS / 1000} s`,
  '',
  '| | setting | commands | per process and second |',
  '|---|---|---:|---:|',
  ...CONTENDERS.map(
    ({ module, setting }, index) =>
      `| ${module} | ${setting} | ${watched[index]} | ${(watched[index] / 4 / (WAIT_MS / 1000)).toFixed(2)} |`,
  ),
  '',
].join('\n')
redis.disconnect()
await server.stop()
console.log(report)
if (!quick) writeFileSync(new URL('results-handoff.md', import.meta.url), report)
