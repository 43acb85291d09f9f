// Calls without contention: pairs of an acquire and a release of a free name, and failed tries: one attempt for a name that another
// process holds, with the result "busy".
import { measureAll } from '../measure.mjs'
import {
  cluster,
  delayed,
  etcd,
  zookeeper,
  mongodbPairs,
  mongodbs,
  onStore,
  mysql,
  mysqlTls,
  postgres,
  postgresTls,
  quorum,
  redis,
  redisPairs,
  sentinel,
  tls,
} from './stores.mjs'

const pair = { what: 'pair', one: 'pair', name: 'Pairs' }
const tryHeld = { what: 'tryHeld', one: 'try', name: 'Failed tries' }
const FEW = [1, 64]
const MANY = [1, 64, 1024]

/** The calls, store and loads of each table, by part. */
export const TABLES = {
  pairs: [
    { ...pair, store: redisPairs, loads: [1, 16, 64, 256, 1024] },
    ...mongodbPairs.map((store) => ({ ...pair, store, loads: [1, 64, 256] })),
  ],
  tls: [{ ...pair, store: tls, loads: [1, 16, 64, 1024] }],
  cluster: [{ ...pair, store: cluster, loads: [1, 16, 64, 1024] }],
  sentinel: [{ ...pair, store: sentinel, loads: [1, 16, 64, 1024] }],
  delayed: [0.5, 2].map((extraMs) => ({ ...pair, store: delayed(extraMs), loads: MANY })),
  tries: [redis, ...mongodbs.slice(0, 2)].map((store) => ({ ...tryHeld, store, loads: FEW })),
  postgres: [postgres, postgresTls].map((store) => ({ ...pair, store, loads: [1, 64, 256] })),
  mysql: [mysql, mysqlTls].map((store) => ({ ...pair, store, loads: [1, 64, 256] })),
  etcd: [{ ...pair, store: etcd, loads: [1, 64, 256] }],
  zookeeper: [{ ...pair, store: zookeeper, loads: [1, 64, 256] }],
  quorum: [3, 5].map((size) => ({ ...pair, store: quorum(size), loads: FEW })),
}

/** Measures the tables of one part. */
async function measure(part, timing) {
  const fields = []
  for (const { store, what, one, name, ...table } of TABLES[part]) {
    // A smoke test has the smallest and the largest load.
    const loads = table.loads.filter((_, i) => !timing.quick || i === 0 || i === table.loads.length - 1)
    fields.push(
      await onStore(store, async ({ target, probe, note, title }) => {
        const contenders = timing.chosen(store.contenders)
        const results = await measureAll({ contenders, target, what, loads, probe, shares: store.shares, ...timing })
        return { title: `${name}, ${title}`, note: await note?.(), one, floor: store.floor, results }
      }),
    )
  }
  return { fields }
}

/** The parts, by name. */
export const calls = Object.fromEntries(
  Object.keys(TABLES).map((part) => [part, (/** @type {any} */ timing) => measure(part, timing)]),
)
