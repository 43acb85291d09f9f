// Measures hand-offs on any store: the time from a release to the next grant, and the commands per hand-off and while calls wait.
// Every contender has separate processes. The contenders run one after the other in several rounds, and the hand-offs of all
// rounds count together.
import { writeFileSync } from 'node:fs'
import { cpus } from 'node:os'
import { setTimeout as sleep } from 'node:timers/promises'
import { installDependencies } from '../scripts/setup.mjs'
import { releaseBuild } from './build.mjs'
import { WaiterProcesses, FOR_EVER, HOLD } from './waiter-processes.mjs'
import { contenderVersions, median } from './report.mjs'

export const quick = process.argv.includes('--quick')
const ROUNDS = quick ? 1 : 3
/** Hand-offs per round whose latency counts, and the limit for all of them. */
const HANDOFFS = quick ? 3 : 200
const LONGEST_MS = quick ? 3000 : 12_000
/** Hand-offs before, which do not count, and hand-offs afterwards, whose commands are counted. */
const WARM_UP = quick ? 1 : 20
const COUNTED = quick ? 3 : 50
const WAIT_MS = quick ? 500 : 10_000
/** Time until all calls wait. */
const SETTLE_MS = quick ? 200 : 1000
/** Time for late messages of busy processes. */
const LATE_MS = quick ? 50 : 500

const LOADS = [
  { title: '1 waiter', processes: 1, waiters: 1 },
  { title: '10 waiters in one process', processes: 1, waiters: 10 },
  { title: '100 waiters in one process', processes: 1, waiters: 100 },
  { title: '100 waiters in 4 processes', processes: 4, waiters: 100 },
].filter(({ waiters, processes }) => !quick || waiters === 1 || processes > 1)

/** Installs the dependencies and builds the addon, before a store's driver is imported. */
export async function prepare() {
  installDependencies()
  installDependencies('bench')
  // The addon next to index.js may be a debug build: figures need a release build.
  if (!quick) process.env.NAPI_RS_NATIVE_LIBRARY_PATH ??= await releaseBuild()
}

/**
 * Measures `contenders`: `{ module, setting, retryMs }`, the first of them holdfast. `retryMs` is the pause between two
 * attempts; without it, the contender's default. Prints a report, and writes it to `file` except in a smoke test.
 *
 * `store` is the server: its `url`, `version`, `probe` (the name of a round trip), `ping()`, `reset()`, which empties it, and
 * `count()`, which resolves to a function that resolves to the number of commands since then. `counted` is a sentence about
 * these commands.
 */
export async function measureHandOffs({ store, contenders, file }) {
  const trips = { busy: [], idle: [] }
  async function timeRoundTrips() {
    trips.busy.push(await roundTrip(store, quick ? 100 : 3000, false))
    trips.idle.push(await roundTrip(store, quick ? 20 : 500, true))
  }
  await timeRoundTrips()
  const results = LOADS.map(() => contenders.map(() => ({ latencies: [], commands: [] })))
  for (let round = 0; round < ROUNDS; round++) {
    for (const [at, load] of LOADS.entries()) {
      // The order alternates from round to round: a drift of the machine affects all contenders equally.
      const order = [...contenders.keys()]
      for (const index of round % 2 === 0 ? order : order.reverse()) {
        const { latencies, commands } = await measure(store, contenders[index], load)
        results[at][index].latencies.push(...latencies)
        results[at][index].commands.push(commands)
      }
    }
    await timeRoundTrips()
  }
  const idleCommands = []
  for (const contender of contenders) idleCommands.push(await countIdleCommands(store, contender))

  const report = write({ store, contenders, trips, results, idleCommands })
  console.log(report)
  if (!quick) writeFileSync(new URL(file, import.meta.url), report)
}

/** Measures the median of `count` round trips, one after the other, in µs. With `hasPause` there is a pause before each. */
async function roundTrip(store, count, hasPause) {
  const times = []
  for (let ping = 0; ping < count; ping++) {
    if (hasPause) await sleep(HOLD.leastMs)
    const start = performance.now()
    await store.ping()
    times.push((performance.now() - start) * 1000)
  }
  return median(times)
}

async function start(store, contender, processes) {
  await store.reset()
  return WaiterProcesses.start(store.url, contender, processes)
}

async function measure(store, contender, { processes, waiters }) {
  const running = await start(store, contender, processes)
  running.join(waiters + 1)
  await running.handOffs(WARM_UP + HANDOFFS, LONGEST_MS)
  const latencies = await running.latencies(WARM_UP, LATE_MS)
  // Separate from the latencies: MONITOR makes a server slower.
  const counted = await store.count()
  const handOffs = await running.handOffs(COUNTED, LONGEST_MS / 3)
  const commands = (await counted()) / handOffs
  await running.end()
  return { latencies, commands }
}

/** Counts the commands while 100 waiters in 4 processes wait and no lock is released. */
async function countIdleCommands(store, contender) {
  const running = await start(store, contender, 4)
  running.join(1, FOR_EVER)
  await running.handOffs(1, LONGEST_MS)
  running.join(100)
  await sleep(SETTLE_MS)
  const counted = await store.count()
  await sleep(WAIT_MS)
  const commands = await counted()
  await running.end()
  return commands
}

const spread = (values) =>
  `${median(values).toFixed(0)} (${Math.min(...values).toFixed(0)}–${Math.max(...values).toFixed(0)})`
const ms = (microseconds) => (microseconds / 1000).toFixed(2)
const p99 = (values) => [...values].sort((a, b) => a - b)[Math.ceil(values.length * 0.99) - 1]

function write({ store, contenders, trips, results, idleCommands }) {
  const [busy, idle] = [median(trips.busy), median(trips.idle)]
  const table = (rows) => {
    const own = median(rows[0].latencies)
    return rows.map(({ latencies, commands }, index) => {
      const { module, setting } = contenders[index]
      const mid = median(latencies)
      const figures = [
        latencies.length,
        ms(mid),
        ms(p99(latencies)),
        (mid / busy).toFixed(1),
        (mid / idle).toFixed(1),
        `${(mid / own).toFixed(1)} ×`,
        median(commands).toFixed(1),
      ]
      return `| ${module} | ${setting} | ${figures.join(' | ')} |`
    })
  }
  return [
    '# Hand-offs',
    '',
    `${cpus().length} × ${cpus()[0].model}, Node ${process.version}, ${store.version} on loopback. ` +
      `A round trip (the median ${store.probe} in the same run) takes ${spread(trips.busy)} µs without pauses, and ` +
      `${spread(trips.idle)} µs after a pause of ${HOLD.leastMs} ms, like the one before each hand-off.`,
    '',
    'A hand-off is the time from the call of `release` until the next holder’s `acquire` has resolved, in any process. ' +
      `The lock is held for ${HOLD.leastMs} to ${HOLD.mostMs} ms, and the number of waiters is constant. ${ROUNDS} rounds of up ` +
      `to ${HANDOFFS} hand-offs or ${LONGEST_MS / 1000} s, interleaved. ${store.counted} All contenders wait without a timeout, ` +
      'whatever their default.',
    '',
    `Versions: ${contenderVersions(store.packages)}.`,
    '',
    ...LOADS.flatMap(({ title }, at) => [
      `## ${title}`,
      '',
      '| | setting | hand-offs | median, ms | p99, ms | in round trips | in round trips after a pause | holdfast is faster | commands per hand-off |',
      '|---|---|---:|---:|---:|---:|---:|---:|---:|',
      ...table(results[at]),
      '',
    ]),
    `## 100 waiters in 4 processes that wait for ${WAIT_MS / 1000} s`,
    '',
    '| | setting | commands | per process and second |',
    '|---|---|---:|---:|',
    ...contenders.map(
      ({ module, setting }, index) =>
        `| ${module} | ${setting} | ${idleCommands[index]} | ${(idleCommands[index] / 4 / (WAIT_MS / 1000)).toFixed(2)} |`,
    ),
    '',
  ].join('\n')
}
