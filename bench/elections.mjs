// Runs the same faults on the leader elections and scheduled jobs of holdfast and of other tools. Its own method is in README.md.
//
//   node bench/elections.mjs                        everything, some forty minutes; writes results-elections.md
//   node bench/elections.mjs --faults killed,ticks  some faults; prints, and writes nothing
//   node bench/elections.mjs --contenders 'etcdctl lock'  some contenders
//   node bench/elections.mjs --trials 3             the number of trials of each fault
//   node bench/elections.mjs --out FILE             writes into another file, in any case
//   node bench/elections.mjs --quick                a smoke test with a ttl of 2 s; writes nothing
//
// Uses the addon in NAPI_RS_NATIVE_LIBRARY_PATH if set. Otherwise it builds one, with `--quick` it uses the one next to index.js.
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { cpus, loadavg } from 'node:os'
import { delimiter, dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { locateEtcdctl } from '../scripts/etcd.mjs'
import { installDependencies, serversDir } from '../scripts/setup.mjs'
import { CONTENDERS, serverVersions, STORES } from './elections/contenders.mjs'
import { JOB_MS } from './elections/step-log.mjs'
import { faultTable, settingsTable, tickTable } from './elections/report.mjs'
import { INTERVAL_MS, runsPerTick, SKEWS, TICKERS } from './elections/ticks.mjs'
import { FAULTS, trial } from './elections/trial.mjs'
import { releaseBuild } from './build.mjs'
import { contenderVersions } from './report.mjs'

const { values: args } = parseArgs({
  options: {
    quick: { type: 'boolean', default: false },
    faults: { type: 'string' },
    contenders: { type: 'string' },
    trials: { type: 'string' },
    out: { type: 'string' },
  },
})
const { quick } = args
const ttlMs = quick ? 2000 : 5000
const settleMs = quick ? 500 : 2000
const ticks = quick ? 2 : 20
/** How many contenders run at the same time. They wait most of the time, and each has its own server. */
const AT_A_TIME = quick ? 7 : 3
const PARTS = [...Object.keys(FAULTS), 'ticks']
const NAMES = [...new Set([...Object.keys(CONTENDERS), ...Object.keys(TICKERS)])]
const parts = chosen('faults', PARTS, quick ? ['resigns', 'killed', 'ticks'] : PARTS)
const names = chosen('contenders', NAMES, NAMES)
const isWhole = !quick && !args.faults && !args.contenders && !args.trials

/** Returns the values of an argument, all of which are in `all`. */
function chosen(name, all, usual) {
  const values = args[name]?.split(/,(?! )/) ?? usual
  for (const value of values) if (!all.includes(value)) throw new Error(`--${name} ${value}: one of ${all.join('; ')}`)
  return values
}

/** Calls `run` for each item, some at a time. */
async function forEach(items, atATime, run) {
  const left = [...items]
  await Promise.all(
    Array.from({ length: atATime }, async () => {
      for (let item = left.shift(); item !== undefined; item = left.shift()) await run(item)
    }),
  )
}

// The exit handlers end what was started.
for (const name of ['SIGINT', 'SIGTERM']) process.once(name, () => process.exit(1))
installDependencies()
installDependencies('bench')
if (!quick) process.env.NAPI_RS_NATIVE_LIBRARY_PATH ??= await releaseBuild()
process.env.HOLDFAST_SERVERS_DIR ??= serversDir()
process.env.PATH = [dirname(await locateEtcdctl()), process.env.PATH].join(delimiter)
const folder = mkdtempSync(join(process.env.HOLDFAST_SERVERS_DIR, 'holdfast-elections-'))
const servers = []
const startedLoad = loadavg()[0]

/** Returns a server of a store, for one contender. */
async function start(store) {
  const server = await STORES[store]()
  servers.push(server)
  return server
}

/** The outcomes of a contender's trials of a fault. */
async function outcomesOf(fault, contender, server) {
  const outcomes = []
  for (let left = Number(args.trials ?? (quick ? 1 : fault.trials)); left > 0; left--)
    outcomes.push(await trial(contender, fault, { server, ttlMs, settleMs, folder }))
  return outcomes
}

const sections = []
try {
  const own = {}
  for (const part of parts) {
    const started = performance.now()
    const results = {}
    const fault = FAULTS[part]
    const all = fault ? CONTENDERS : TICKERS
    const here = Object.entries(all).filter(
      ([name, { store, isCommand }]) =>
        names.includes(name) && (!fault?.commandsOnly || isCommand) && (!fault?.isEmpty || store === 'redis'),
    )
    // The rows are in the order of the contenders.
    for (const [name] of here) results[name] = []
    // Hand-offs take milliseconds, and are measured one at a time.
    await forEach(here, part === 'resigns' && !quick ? 1 : AT_A_TIME, async ([name, contender]) => {
      const key = `${fault?.isEmpty ? 'redis-empty' : contender.store} of ${name}`
      const server = (own[key] ??= await start(key.split(' ')[0]))
      results[name] = fault
        ? await outcomesOf(fault, contender, server)
        : await runsPerTick(name, { url: server.url, ticks, folder })
    })
    if (Object.keys(results).length === 0) continue
    const clocks = `by ${SKEWS[0]} ms, 0 and ${SKEWS[2]} ms`
    const text = `Three instances whose clocks differ from the true time ${clocks} call at each tick, every ${INTERVAL_MS / 1000} s. The job takes ${JOB_MS} ms.`
    sections.push(fault ? faultTable(fault, results) : tickTable(text, results, TICKERS))
    console.error(`${part}: ${((performance.now() - started) / 1000).toFixed(0)} s`)
  }
} finally {
  await Promise.all(servers.map((server) => server.stop()))
  rmSync(folder, { recursive: true, force: true })
}

const trials = args.trials ?? (quick ? '1' : '3 to 7')
const versions = [
  contenderVersions(['nestjs-redlock-universal', 'redlock-universal', 'etcd3']),
  ...(await serverVersions()),
]
const candidates = Object.fromEntries(Object.entries(CONTENDERS).filter(([name]) => names.includes(name)))
const report = [
  '# Faults of elections and scheduled jobs',
  '',
  `${cpus().length} × ${cpus()[0].model}, Node ${process.version}. Versions: ${versions.join(', ')}. Load average ${startedLoad.toFixed(1)} at the begin, ${loadavg()[0].toFixed(1)} at the end.`,
  '',
  `A ttl of ${ttlMs / 1000} s, three candidates in three processes, trials of each fault: ${trials}; the median, and the range in brackets. Each candidate's job writes a line every 10 ms, by the monotonic clock of the machine: shorter overlaps of two jobs are not seen. The method is in [README.md](README.md).`,
  '',
  ...sections,
  settingsTable(candidates),
].join('\n')
console.log(report)
const out = args.out ?? (isWhole ? fileURLToPath(new URL('results-elections.md', import.meta.url)) : undefined)
if (out) writeFileSync(out, report)
