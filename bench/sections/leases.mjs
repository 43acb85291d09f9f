// The cost of many held and renewed leases: memory, CPU time, and commands at the server. Every contender has a separate process
// and server. They run one after the other in several rounds; the figures are medians.
import { setTimeout as sleep } from 'node:timers/promises'
import { startContender } from '../contender-process.mjs'
import { describe } from '../describe.mjs'
import { cell, spread } from '../report.mjs'
import { etcd, mysql, onStore, postgres, redis, zookeeper } from './stores.mjs'

const CONTENDERS = ['holdfast', 'redlock', 'redis-semaphore']
/** The first ttl is holdfast's default. After `settleMs` the rate of its renewals is constant. */
const LOADS = [
  { ttlMs: 30_000, settleMs: 7000, watchMs: 30_000 },
  { ttlMs: 3000, settleMs: 3000, watchMs: 10_000 },
]
const QUICK_LOADS = [{ ttlMs: 3000, settleMs: 0, watchMs: 3000 }]

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

export async function leases({ quick, rounds: most, chosen }) {
  const [rounds, count, loads] = quick ? [1, 200, QUICK_LOADS] : [Math.min(most, 2), 10_000, LOADS]
  const contenders = chosen(CONTENDERS)
  /** @type {Record<string, Awaited<ReturnType<typeof measure>>[]>[]} */
  const results = loads.map(() => Object.fromEntries(contenders.map((name) => [name, []])))
  let version
  for (let round = 0; round < rounds; round++) {
    for (const [at, load] of loads.entries()) {
      // The order alternates from round to round: a drift of the machine affects all contenders equally.
      for (const name of round % 2 === 0 ? contenders : [...contenders].reverse()) {
        await onStore(redis, async ({ target, title }) => {
          version = title
          results[at][name].push(await measure(name, target, count, load))
        })
      }
    }
  }
  const row = async (name, at) => {
    const cells = COLUMNS.map(([, field, digits]) => cell(spread(results[at][name], field), digits))
    return `| ${name} | ${(await describe(name)).holds} | ${cells.join(' | ')} |`
  }
  const section = async ({ ttlMs, watchMs }, at) => [
    `## A ttl of ${ttlMs / 1000} s, for ${watchMs / 1000} s`,
    '',
    `| | holds with | ${COLUMNS.map(([title]) => title).join(' | ')} |`,
    `|---|---|${'---:|'.repeat(COLUMNS.length)}`,
    ...(await Promise.all(contenders.map((name) => row(name, at)))),
    '',
  ]
  const markdown = [
    `${version} on loopback. ${count} leases in one process; ${rounds} rounds, medians, with the range in brackets.`,
    '',
    'Memory is the used part of the JavaScript heap and the rest of the resident set, after a garbage collection, minus the same',
    'after as many locks were acquired and released, 100 at a time. A request is one script; the second column of commands also',
    'counts the commands inside scripts, as `total_commands_processed` does. holdfast renews at 0.9 to 1.0 of a third of the ttl,',
    'redlock 500 ms before the end, redis-semaphore at 0.8 of the ttl: with a ttl of 30 s these two renew once in the time, and',
    'holdfast 3 times or more.',
    '',
    ...(await Promise.all(loads.map(section))).flat(),
  ].join('\n')
  return { fields: [], names: contenders, markdown }
}

export const leasesPostgres = (timing) => leasesOn(postgres, timing)
export const leasesEtcd = (timing) => leasesOn(etcd, timing)
export const leasesZookeeper = (timing) => leasesOn(zookeeper, timing)
export const leasesMysql = (timing) => leasesOn(mysql, timing)

/** What holdfast's leases cost on an SQL server. */
async function leasesOn(store, { quick }) {
  const [count, [{ ttlMs, settleMs, watchMs }]] = quick ? [200, QUICK_LOADS] : [10_000, LOADS]
  return onStore(store, async ({ target, probe }) => {
    const holder = await startContender('holdfast', target, { execArgv: ['--expose-gc'] })
    const watch = async (ms) => {
      const spent = await probe.start()
      const { cpuPercent, lost } = await holder.ask({ what: 'watch', ms })
      const { cpuUs } = await spent()
      // Separate from the timed run: the count makes a server slower.
      const counted = await probe.count()
      await holder.ask({ what: 'watch', ms })
      const statements = await counted()
      const figures = [cpuPercent, cpuUs / ms / 10, (statements / ms) * 1000].map((figure) => figure.toFixed(1))
      return { lost, statements, cells: figures.join(' | ') }
    }
    await holder.ask({ what: 'pair', inFlight: 1, ms: 100, prefix: 'idle' })
    await sleep(settleMs)
    const idle = await watch(watchMs / 3)
    await holder.ask({ what: 'hold', count, ttlMs })
    await sleep(settleMs)
    const busy = await watch(watchMs)
    await holder.kill()
    if (busy.statements === 0 || busy.lost > 0)
      throw new Error(`holdfast lost ${busy.lost} of ${count} leases in ${busy.statements} statements`)
    const markdown = [
      `## ${count} leases with a ttl of ${ttlMs / 1000} s, for ${watchMs / 1000} s`,
      '',
      '| | client CPU, % of a core | server CPU, % of a core | statements per second |',
      '|---|---:|---:|---:|',
      `| holdfast | ${busy.cells} |`,
      `| holdfast, no lease and no waiter, for ${watchMs / 3000} s | ${idle.cells} |`,
      '',
    ].join('\n')
    return { fields: [], names: ['holdfast'], markdown }
  })
}

/** Reads the server's counters. */
async function counted(redis) {
  const info = await redis.info('everything')
  const calls = {}
  for (const [, name, count] of info.matchAll(/^cmdstat_([^:]+):calls=(\d+)/gm)) calls[name] = Number(count)
  const number = (field) => Number(new RegExp(`^${field}:(\\S+)`, 'm').exec(info)?.[1])
  const seconds = number('used_cpu_user') + number('used_cpu_sys')
  // The contenders renew with scripts, and the commands inside a script are counted, too.
  const requests = (calls.evalsha ?? 0) + (calls.eval ?? 0)
  const all = Object.values(calls).reduce((sum, count) => sum + count, 0)
  return { requests, all, seconds, bytes: number('total_net_input_bytes') }
}

/** Measures one contender on an empty server. Rejects when it does not renew, or loses most of its leases. */
async function measure(name, target, count, { ttlMs, settleMs, watchMs }) {
  const { Redis } = await import('ioredis')
  const redis = new Redis(target.urls[0])
  const holder = await startContender(name, target, { execArgv: ['--expose-gc'] })
  const before = await holder.ask({ what: 'hold', count, ttlMs })
  await sleep(settleMs)
  const start = await counted(redis)
  const startedAt = performance.now()
  const { cpuPercent, lost } = await holder.ask({ what: 'watch', ms: watchMs })
  const end = await counted(redis)
  const elapsed = (performance.now() - startedAt) / 1000
  const after = await holder.ask({ what: 'memory' })
  const held = await redis.dbsize()
  redis.disconnect()
  // A clean end is not measured.
  await holder.kill()
  if (end.requests === start.requests || held < count / 2)
    throw new Error(
      `${name} has ${held} of ${count} leases at the end, after ${end.requests - start.requests} requests`,
    )
  const perSecond = (field) => (end[field] - start[field]) / elapsed
  return {
    memory: (after.used - before.used) / count,
    heap: (after.heapUsed - before.heapUsed) / count,
    cpu: cpuPercent,
    requests: perSecond('requests'),
    all: perSecond('all'),
    serverCpu: perSecond('seconds') * 100,
    bytes: perSecond('bytes') / 1024,
    lost,
  }
}
