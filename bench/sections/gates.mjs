// The rows of `npm run gates`, and how each is measured: two builds of holdfast on the same servers, one at a time.
import { setTimeout as sleep } from 'node:timers/promises'
import { startContender } from '../contender-process.mjs'
import { measureAll } from '../measure.mjs'
import { median } from '../report.mjs'
import { HOLD, Waiters } from '../waiters.mjs'
import * as stores from './stores.mjs'

const SIDES = ['base', 'head']
/** Hand-offs that do not count, the limit for all of a round, and the time for late messages. */
const HAND_OFFS = { warmUp: 20, longestMs: 12_000, lateMs: 100 }
const LEASE_TTL_MS = 3000

/**
 * The rows of each store, by what is measured: calls in flight, waiters in one process, or held leases.
 *
 * @type {Record<string, [any, Record<string, number[]>]>}
 */
const STORES = {
  redis: [stores.redis, { using: [1, 16, 64, 1024], pair: [1, 16, 64, 1024], handOff: [10, 100], leases: [10_000] }],
  'redis-tls': [stores.tls, { pair: [1, 64, 1024] }],
  'redis-sentinel': [stores.sentinel, { pair: [64] }],
  'redis-cluster': [stores.cluster, { pair: [1, 64, 1024] }],
  'redis-quorum': [stores.quorum(3), { pair: [1, 64] }],
  mongodb: [stores.mongodbs[0], { pair: [64] }],
  'mongodb-set': [stores.replicaSet, { pair: [1, 64, 256], handOff: [10, 100] }],
  postgres: [stores.postgres, { pair: [1, 64, 256], handOff: [10, 100] }],
  mariadb: [stores.mysql, { pair: [1, 64] }],
  sqlite: [stores.sqlite, { pair: [1, 64] }],
  memory: [stores.memory, { pair: [64] }],
  etcd: [stores.etcd, { pair: [1, 64] }],
  zookeeper: [stores.zookeeper, { pair: [1, 64] }],
}
const UNITS = { using: 'pairs/s', pair: 'pairs/s', handOff: 'µs', leases: '% CPU' }

/**
 * The rows, by name. More pairs per second are better, and less of the other figures.
 *
 * @type {Record<string, { unit: string, isMoreBetter: boolean }>}
 */
export const ROWS = Object.fromEntries(
  Object.entries(STORES).flatMap(([on, [, calls]]) =>
    Object.entries(calls).flatMap(([call, loads]) =>
      loads.map((load) => [rowOf(on, call, load), { unit: UNITS[call], isMoreBetter: UNITS[call] === 'pairs/s' }]),
    ),
  ),
)

function rowOf(on, call, load) {
  return `${on}-${call}-${load}`
}

/**
 * Measures the rows `names` in `rounds` rounds: the base, the head, the head, and the base again, `ms` milliseconds each. Hand-offs and
 * leases have a third of the rounds, which are 3 and 12 times as long. `sides` has the environment of each side's processes.
 * Resolves to the figures of all rounds, by row: `[{ base, head }, …]`.
 */
export async function measureRows(names, sides, timing) {
  const results = {}
  for (const [on, [store, calls]] of Object.entries(STORES)) {
    const wanted = Object.entries(calls)
      .map(([call, loads]) => ({ call, loads: loads.filter((load) => names.includes(rowOf(on, call, load))) }))
      .filter(({ loads }) => loads.length > 0)
    if (wanted.length === 0) continue
    const startedAt = performance.now()
    await stores.onStore(store, async ({ target, probe }) => {
      for (const { call, loads } of wanted) {
        const rounds = await MEASURES[call]({ store, target, probe, sides }, loads, timing)
        for (const load of loads) results[rowOf(on, call, load)] = rounds[load]
      }
    })
    console.error(`${on}: ${((performance.now() - startedAt) / 1000).toFixed(0)} s`)
  }
  return results
}

const optionsOf = (env, more) => ({ env: { ...process.env, ...env }, ...more })

/** Returns a function that measures pairs per second with a variant of holdfast, with new processes after half of the rounds. */
const pairsBy =
  (variant) =>
  async ({ store, target, probe, sides }, loads, { rounds, ms }) => {
    const startOne = async (side) =>
      Object.assign(await startContender(variant, target, optionsOf(sides[side])), { name: side })
    const start = () => Promise.all(SIDES.map(startOne))
    const about = { contenders: SIDES, start, target, what: 'pair', loads, probe, shares: store.shares }
    const all = Object.fromEntries(loads.map((load) => [load, []]))
    for (let part = 0; part < 2; part++) {
      const results = await measureAll({ ...about, rounds: Math.ceil(rounds / 2) * 2, ms, warmUpMs: ms * 8 })
      for (const load of loads) {
        const { base, head } = results[load]
        all[load].push(...joined(base.map((one, half) => ({ base: one.perSecond, head: head[half].perSecond }))))
      }
    }
    return all
  }

/** Measures the median time from a release to the next grant, in µs, with a new process for each. */
async function handOffs({ target, sides }, loads, { rounds, ms }) {
  const results = {}
  for (const waiters of loads) {
    results[waiters] = await alternate(rounds, async (side, half) => {
      // The lock of the half before is still held.
      const own = { ...target, keyPrefix: `${process.pid}-${waiters}-${half}-${side}-` }
      const running = await Waiters.start(own, { name: 'holdfast', options: optionsOf(sides[side]) }, 1)
      running.join(waiters + 1)
      const least = HAND_OFFS.warmUp + Math.ceil((ms * 3) / HOLD.mostMs)
      const count = await running.handOffs(least, HAND_OFFS.longestMs)
      if (count < least)
        throw new Error(`the ${side} made ${count} of ${least} hand-offs in ${HAND_OFFS.longestMs / 1000} s`)
      const latencies = await running.latencies(HAND_OFFS.warmUp, HAND_OFFS.lateMs)
      await running.end()
      return median(latencies)
    })
  }
  return results
}

/** Measures the CPU time of a process that holds and renews leases, in % of a core. */
async function leases({ target, sides }, [count], { rounds, ms }) {
  const holders = {}
  for (const side of SIDES) {
    const own = { ...target, keyPrefix: `${side}:` }
    holders[side] = await startContender('holdfast', own, optionsOf(sides[side], { execArgv: ['--expose-gc'] }))
    await holders[side].ask({ what: 'hold', count, ttlMs: LEASE_TTL_MS })
  }
  await sleep(LEASE_TTL_MS)
  const result = await alternate(rounds, async (side) => {
    const { cpuPercent, lost } = await holders[side].ask({ what: 'watch', ms: ms * 12 })
    if (lost > 0) throw new Error(`the ${side} lost ${lost} of ${count} leases`)
    return cpuPercent
  })
  await Promise.all(SIDES.map((side) => holders[side].kill()))
  return { [count]: result }
}

const MEASURES = { using: pairsBy('holdfast-using'), pair: pairsBy('holdfast'), handOff: handOffs, leases }

/** Measures both sides in each half of a round, by `once(side, half)`. Resolves to the figures of each round. */
async function alternate(rounds, once) {
  const halves = []
  for (let half = 0; half < Math.ceil(rounds / 3) * 2; half++) {
    const figures = {}
    for (const side of half % 2 === 0 ? SIDES : [...SIDES].reverse()) figures[side] = await once(side, half)
    halves.push(figures)
  }
  return joined(halves)
}

/** Joins the halves of each round, whose orders are opposite: the side that runs second may be faster. */
function joined(halves) {
  const mean = (side, at) => (halves[at][side] + halves[at + 1][side]) / 2
  const starts = halves.map((_, at) => at).filter((at) => at % 2 === 0)
  return starts.map((at) => ({ base: mean('base', at), head: mean('head', at) }))
}
