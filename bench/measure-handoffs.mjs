// How long it takes from a release until the next one has the lock, and what that and the waiting cost the server: for
// any store. Every contender has processes of its own, one contender after the other, several rounds, all rounds'
// hand-offs together.
import { writeFileSync } from 'node:fs'
import { cpus } from 'node:os'
import { setTimeout as sleep } from 'node:timers/promises'
import { installDependencies } from '../scripts/setup.mjs'
import { releaseBuild } from './build.mjs'
import { WaiterProcesses, FOR_EVER, HOLD } from './waiter-processes.mjs'
import { contenderVersions, median } from './report.mjs'

export const quick = process.argv.includes('--quick')
const ROUNDS = quick ? 1 : 3
/** Hand-offs per round whose latency counts, and the longest that they may take together. */
const HANDOFFS = quick ? 3 : 200
const LONGEST_MS = quick ? 3000 : 12_000
/** Hand-offs before, which do not count, and after, whose commands are counted. */
const WARM_UP = quick ? 1 : 20
const COUNTED = quick ? 3 : 50
const WAIT_MS = quick ? 500 : 10_000
/** Until all who wait have begun to. */
const SETTLE_MS = quick ? 200 : 1000
/** A busy process tells late, and is not to be left out. */
const LATE_MS = quick ? 50 : 500

const CROWDS = [
  { title: '1 waiter', processes: 1, waiters: 1 },
  { title: '10 waiters in one process', processes: 1, waiters: 10 },
  { title: '100 waiters in one process', processes: 1, waiters: 100 },
  { title: '100 waiters in 4 processes', processes: 4, waiters: 100 },
].filter(({ waiters, processes }) => !quick || waiters === 1 || processes > 1)

/** What has to be there before a store's driver can be imported. */
export async function prepare() {
  installDependencies()
  installDependencies('bench')
  // What lies beside index.js may be a debug build: figures come from a release build, whatever is there.
  if (!quick) process.env.NAPI_RS_NATIVE_LIBRARY_PATH ??= await releaseBuild()
}

/**
 * Measures `contenders`: `{ module, setting, retryMs }`, the first of them holdfast. `retryMs` is the pause between two
 * tries; without it, the contender's own. Prints a report, and writes it to `file` unless it was a smoke test.
 *
 * `store` is the server: its `url`, `version` and `probe` (what a round trip is), `ping()`, `reset()`, which leaves it
 * empty, and `count()`, which resolves to a function that resolves to how many commands came since. `counted` says in a
 * sentence which commands those are.
 */
export async function measureHandOffs({ store, contenders, file }) {
  const trips = { busy: [], idle: [] }
  async function timeRoundTrips() {
    trips.busy.push(await roundTrip(store, quick ? 100 : 3000, false))
    trips.idle.push(await roundTrip(store, quick ? 20 : 500, true))
  }
  await timeRoundTrips()
  const results = CROWDS.map(() => contenders.map(() => ({ latencies: [], commands: [] })))
  for (let round = 0; round < ROUNDS; round++) {
    for (const [at, crowd] of CROWDS.entries()) {
      // Whoever goes first in a round goes last in the next: a drift of the machine hits all alike.
      const order = [...contenders.keys()]
      for (const index of round % 2 === 0 ? order : order.reverse()) {
        const { latencies, commands } = await measure(store, contenders[index], crowd)
        results[at][index].latencies.push(...latencies)
        results[at][index].commands.push(commands)
      }
    }
    await timeRoundTrips()
  }
  const watched = []
  for (const contender of contenders) watched.push(await watch(store, contender))

  const report = write({ store, contenders, trips, results, watched })
  console.log(report)
  if (!quick) writeFileSync(new URL(file, import.meta.url), report)
}

/** The median of many round trips, one after the other, in µs; with a pause before each, as before each hand-off, if so told. */
async function roundTrip(store, count, pauses) {
  const times = []
  for (let ping = 0; ping < count; ping++) {
    if (pauses) await sleep(HOLD.leastMs)
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
  const crowd = await start(store, contender, processes)
  crowd.join(waiters + 1)
  await crowd.handOffs(WARM_UP + HANDOFFS, LONGEST_MS)
  const latencies = await crowd.latencies(WARM_UP, LATE_MS)
  // Apart from the latencies: a server that tells of every command is a slower one.
  const counted = await store.count()
  const handOffs = await crowd.handOffs(COUNTED, LONGEST_MS / 3)
  const commands = (await counted()) / handOffs
  await crowd.end()
  return { latencies, commands }
}

/** Commands while 100 waiters of 4 processes wait, and nothing happens. */
async function watch(store, contender) {
  const crowd = await start(store, contender, 4)
  crowd.join(1, FOR_EVER)
  await crowd.handOffs(1, LONGEST_MS)
  crowd.join(100)
  await sleep(SETTLE_MS)
  const counted = await store.count()
  await sleep(WAIT_MS)
  const commands = await counted()
  await crowd.end()
  return commands
}

const spread = (values) => `${median(values).toFixed(0)} (${Math.min(...values).toFixed(0)}–${Math.max(...values).toFixed(0)})`
const ms = (microseconds) => (microseconds / 1000).toFixed(2)
const p99 = (values) => [...values].sort((a, b) => a - b)[Math.ceil(values.length * 0.99) - 1]

function write({ store, contenders, trips, results, watched }) {
  const [busy, idle] = [median(trips.busy), median(trips.idle)]
  const table = (rows) => {
    const own = median(rows[0].latencies)
    return rows.map(({ latencies, commands }, index) => {
      const { module, setting } = contenders[index]
      const mid = median(latencies)
      const figures = [latencies.length, ms(mid), ms(p99(latencies)), (mid / busy).toFixed(1), (mid / idle).toFixed(1), `${(mid / own).toFixed(1)} ×`, median(commands).toFixed(1)]
      return `| ${module} | ${setting} | ${figures.join(' | ')} |`
    })
  }
  return [
    '# Hand-offs',
    '',
    `${cpus().length} × ${cpus()[0].model}, Node ${process.version}, ${store.version} on loopback. ` +
      `A round trip, the median ${store.probe} in the same run, takes ${spread(trips.busy)} µs where one follows the other, and ` +
      `${spread(trips.idle)} µs after a pause of ${HOLD.leastMs} ms, as there is before each hand-off.`,
    '',
    'A hand-off is the time from the call of `release` until the next holder’s `acquire` has resolved, in whichever process. ' +
      `The lock is held for ${HOLD.leastMs} to ${HOLD.mostMs} ms, and as many wait at each hand-off. ${ROUNDS} rounds of up to ` +
      `${HANDOFFS} hand-offs or ${LONGEST_MS / 1000} s, interleaved. ${store.counted} All contenders wait for as long as it ` +
      'takes, whatever their default.',
    '',
    `Versions: ${contenderVersions(store.packages)}.`,
    '',
    ...CROWDS.flatMap(({ title }, at) => [
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
        `| ${module} | ${setting} | ${watched[index]} | ${(watched[index] / 4 / (WAIT_MS / 1000)).toFixed(2)} |`,
    ),
    '',
  ].join('\n')
}
