// The cost of many held and renewed leases: memory, CPU time, and commands at the server. Every contender has a separate process
// and server. They run one after the other in several rounds; the figures are medians.
//
//   npm run bench:leases               writes bench/results-leases.md
//   npm run bench:leases -- --quick    a smoke test: every contender works
//
// Uses the addon in NAPI_RS_NATIVE_LIBRARY_PATH if set.
import { fork } from 'node:child_process'
import { writeFileSync } from 'node:fs'
import { cpus } from 'node:os'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { installDependencies } from '../scripts/setup.mjs'
import { startRedis } from '../scripts/servers.mjs'
import { releaseBuild } from './build.mjs'
import { contenderVersions, median, serverVersion } from './report.mjs'

const quick = process.argv.includes('--quick')
const here = new URL('.', import.meta.url)
const CONTENDERS = ['holdfast', 'redlock', 'redis-semaphore']
const ROUNDS = quick ? 1 : 2
const LEASES = quick ? 200 : 10_000
// The first ttl is holdfast's default.
const LOADS = quick
  ? [{ ttlMs: 3000, settleMs: 0, watchMs: 3000 }]
  : [
      // The time after which the rate of renewals of holdfast is constant.
      { ttlMs: 30_000, settleMs: 7000, watchMs: 30_000 },
      { ttlMs: 3000, settleMs: 3000, watchMs: 10_000 },
    ]

installDependencies()
installDependencies('bench')
// The addon next to index.js may be a debug build: figures need a release build.
if (!quick) process.env.NAPI_RS_NATIVE_LIBRARY_PATH ??= await releaseBuild()
const { Redis } = await import('ioredis')

/** Reads the server's counters. */
async function counted(redis) {
  const info = await redis.info('everything')
  const calls = {}
  for (const [, name, count] of info.matchAll(/^cmdstat_([^:]+):calls=(\d+)/gm)) calls[name] = Number(count)
  const number = (field) => Number(new RegExp(`^${field}:(\\S+)`, 'm').exec(info)[1])
  const seconds = number('used_cpu_user') + number('used_cpu_sys')
  // The contenders renew with scripts, and the commands inside a script are counted, too.
  const requests = (calls.evalsha ?? 0) + (calls.eval ?? 0)
  const all = Object.values(calls).reduce((sum, count) => sum + count, 0)
  return { requests, all, seconds, bytes: number('total_net_input_bytes') }
}

async function measure(module, { ttlMs, settleMs, watchMs }) {
  const server = await startRedis()
  const redis = new Redis(server.url)
  const child = fork(fileURLToPath(new URL('holder.mjs', here)), [module, server.url], { execArgv: ['--expose-gc'] })
  const answer = () =>
    new Promise((resolve, reject) => {
      const ended = (code) => reject(new Error(`${module} ended with ${code}`))
      child.once('exit', ended).once('message', (message) => {
        child.off('exit', ended)
        resolve(message)
      })
    })
  const ask = (message) => {
    const answered = answer()
    child.send(message)
    return answered
  }
  await answer()
  const before = await ask({ what: 'hold', count: LEASES, ttlMs })
  await sleep(settleMs)
  const start = await counted(redis)
  const startedAt = performance.now()
  const { cpuPercent, lost } = await ask({ what: 'watch', ms: watchMs })
  const end = await counted(redis)
  const elapsed = (performance.now() - startedAt) / 1000
  const after = await ask({ what: 'memory' })
  child.removeAllListeners('exit')
  // A clean end is not measured.
  child.kill('SIGKILL')
  redis.disconnect()
  await server.stop()
  const perSecond = (field) => (end[field] - start[field]) / elapsed
  return {
    memory: (after.used - before.used) / LEASES,
    heap: (after.heapUsed - before.heapUsed) / LEASES,
    cpu: cpuPercent,
    requests: perSecond('requests'),
    all: perSecond('all'),
    serverCpu: perSecond('seconds') * 100,
    bytes: perSecond('bytes') / 1024,
    lost,
  }
}

const results = LOADS.map(() => Object.fromEntries(CONTENDERS.map((module) => [module, []])))
for (let round = 0; round < ROUNDS; round++) {
  for (const [at, load] of LOADS.entries()) {
    // The order alternates from round to round: a drift of the machine affects all contenders equally.
    for (const module of round % 2 === 0 ? CONTENDERS : [...CONTENDERS].reverse()) {
      results[at][module].push(await measure(module, load))
    }
  }
}

const COLUMNS = [
  ['memory, bytes per lease', 'memory', 0],
  ['of it JavaScript heap', 'heap', 0],
  ['client CPU, % of a core', 'cpu', 1],
  ['requests at the server per second', 'requests', 0],
  ['with what scripts call', 'all', 0],
  ['sent to the server, KiB/s', 'bytes', 0],
  ['server CPU, % of a core', 'serverCpu', 1],
  ['lost', 'lost', 0],
]

async function row(module, at) {
  const { holds } = await import(`./contenders/${module}.mjs`)
  const cells = COLUMNS.map(([, field, digits]) => {
    const values = results[at][module].map((result) => result[field])
    const [low, mid, high] = [Math.min(...values), median(values), Math.max(...values)].map((n) => n.toFixed(digits))
    return low === high ? mid : `${mid} (${low}–${high})`
  })
  return `| ${module} | ${holds} | ${cells.join(' | ')} |`
}

async function section({ ttlMs, watchMs }, at) {
  return [
    `## A ttl of ${ttlMs / 1000} s, for ${watchMs / 1000} s`,
    '',
    `| | holds with | ${COLUMNS.map(([title]) => title).join(' | ')} |`,
    `|---|---|${'---:|'.repeat(COLUMNS.length)}`,
    ...(await Promise.all(CONTENDERS.map((module) => row(module, at)))),
    '',
  ]
}

const server = await startRedis()
const report = [
  '# Held leases',
  '',
  `${cpus().length} × ${cpus()[0].model}, Node ${process.version}, ${await serverVersion('redis', server.url)} on loopback. ` +
    `${LEASES} leases in one process; ${ROUNDS} rounds, medians, with the range in brackets.`,
  '',
  `Versions: ${contenderVersions(['ioredis', 'redlock', 'redis-semaphore'])}.`,
  '',
  'Memory is the used part of the JavaScript heap and the rest of the resident set, after a garbage collection, minus the same',
  'after as many locks were acquired and released, 100 at a time. A request is one script; the second column of commands also',
  'counts the commands inside scripts, as `total_commands_processed` does. holdfast renews at 0.9 to 1.0 of a third of the ttl,',
  'redlock 500 ms before the end, redis-semaphore at 0.8 of the ttl: with a ttl of 30 s these two renew once in the time, and',
  'holdfast 3 times or more.',
  '',
  ...(await Promise.all(LOADS.map(section))).flat(),
].join('\n')
await server.stop()
console.log(report)
if (!quick) writeFileSync(new URL('results-leases.md', here), report)
