// Measures every contender in one run, in separate processes, alternately, in several rounds; the figures are medians.
//
//   npm run bench                             measures everything, writes the files of REPORTS, and their figures into the documents
//   npm run bench -- --only leases,handoff    some parts; writes a file when all of its parts were measured
//   npm run bench -- --contenders holdfast,redlock  some contenders; writes nothing
//   npm run bench -- --rounds N --ms N        the number and the length of the rounds (at most 3 rounds of hand-offs, 2 of leases)
//   npm run bench -- --out FOLDER             writes into another folder, in any case
//   npm run bench -- --quick                  a smoke test: every contender works; writes nothing
//
// Uses the addon in NAPI_RS_NATIVE_LIBRARY_PATH if set.
import { mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { installDependencies } from '../scripts/setup.mjs'
import { releaseBuild } from './build.mjs'
import { describe } from './describe.mjs'
import { writeFigures } from './figures.mjs'
import { plots } from './plot.mjs'
import { compact, contenderVersions, machine, tables } from './report.mjs'
import { calls } from './sections/calls.mjs'
import { footprint } from './sections/footprint.mjs'
import {
  handoff,
  handoffEtcd,
  handoffMongodb,
  handoffMysql,
  handoffPostgres,
  handoffZookeeper,
} from './sections/handoff.mjs'
import { leases, leasesEtcd, leasesMysql, leasesPostgres, leasesZookeeper } from './sections/leases.mjs'
import { rust } from './sections/rust.mjs'
import { service } from './sections/service.mjs'
import { contenderTable, summary } from './summary.mjs'

const { postgres, mysql, etcd, zookeeper, ...others } = calls
/** The reports, by file, and the parts of each. */
const REPORTS = {
  results: { title: 'Benchmark', parts: { ...others, service, footprint } },
  'results-handoff': { title: 'Hand-offs', parts: { handoff } },
  'results-handoff-mongodb': { title: 'Hand-offs on MongoDB', parts: { 'handoff-mongodb': handoffMongodb } },
  'results-postgres': {
    title: 'PostgreSQL',
    parts: { postgres, 'postgres-rust': rust, 'handoff-postgres': handoffPostgres, 'leases-postgres': leasesPostgres },
  },
  'results-mysql': {
    title: 'MariaDB',
    parts: { mysql, 'handoff-mysql': handoffMysql, 'leases-mysql': leasesMysql },
  },
  'results-etcd': {
    title: 'etcd',
    parts: { etcd, 'handoff-etcd': handoffEtcd, 'leases-etcd': leasesEtcd },
  },
  'results-zookeeper': {
    title: 'ZooKeeper',
    parts: { zookeeper, 'handoff-zookeeper': handoffZookeeper, 'leases-zookeeper': leasesZookeeper },
  },
  'results-leases': { title: 'Held leases', parts: { leases } },
}
const PARTS = Object.values(REPORTS).flatMap(({ parts }) => Object.keys(parts))

const { values: args } = parseArgs({
  options: {
    quick: { type: 'boolean', default: false },
    only: { type: 'string' },
    contenders: { type: 'string' },
    rounds: { type: 'string' },
    ms: { type: 'string' },
    out: { type: 'string' },
  },
})
const { quick } = args
const wanted = args.only?.split(',') ?? PARTS
const number = (name, usual) => {
  const value = Number(args[name] ?? usual)
  if (!Number.isInteger(value) || value < 1)
    throw new Error(`--${name} ${args[name]}: must be a whole number from 1 on`)
  return value
}
const rounds = number('rounds', quick ? 1 : 7)
const ms = number('ms', quick ? 40 : 800)
const names = args.contenders?.split(',')
for (const part of wanted) if (!PARTS.includes(part)) throw new Error(`--only ${part}: one of ${PARTS.join(', ')}`)

// The modules of this folder import drivers when they measure, which are installed by then.
installDependencies()
installDependencies('bench')
// The addon next to index.js may be a debug build: figures need a release build.
if (!quick) process.env.NAPI_RS_NATIVE_LIBRARY_PATH ??= await releaseBuild()

const timing = {
  rounds,
  ms,
  // With one call at a time V8 needs this long to optimise the code.
  warmUpMs: quick ? 40 : 1500,
  quick,
  /** Selects the chosen ones of a part's contenders. */
  chosen(all) {
    const some = all.filter((name) => !names || names.includes(name))
    if (some.length === 0) throw new Error(`--contenders ${args.contenders}: choose from ${all.join(', ')}`)
    return some
  },
}
const folder = args.out ?? fileURLToPath(new URL('.', import.meta.url))
if (args.out) mkdirSync(args.out, { recursive: true })

const METHOD = [
  `Servers on loopback. ${rounds} rounds of ${ms} ms per cell, interleaved; medians, with the range in brackets. A pair is one ` +
    'acquire and one release of a free name. The method is in [README.md](README.md).',
  '',
]
/** What the reports with tables of calls say first. */
const INTRO = {
  results: [
    ...METHOD,
    'On a standalone MongoDB the writes of holdfast wait for the journal (`w=majority`). The others’ do not, which is the ' +
      'driver’s default. On the replica sets all write with `w=majority`; with one member a majority is the journal of that member, and ' +
      'nothing is replicated.',
    '',
  ],
  'results-mysql': [
    ...METHOD,
    'Every commit waits for the disk (`innodb_flush_log_at_trx_commit = 1`). A lock of `GET_LOCK` is in the memory of the server and writes nothing.',
    '',
  ],
  'results-etcd': [...METHOD, 'Every commit waits for the disk (one member, its defaults).', ''],
  'results-zookeeper': [...METHOD, 'Every commit waits for the disk (one server).', ''],
  'results-postgres': [
    ...METHOD,
    'Every commit waits for the disk (`fsync` and `synchronous_commit` are on). An advisory lock is in the memory of the server and writes nothing.',
    '',
  ],
}

let hasWritten = false
for (const [file, { title, parts }] of Object.entries(REPORTS)) {
  const measured = {}
  for (const part of Object.keys(parts).filter((part) => wanted.includes(part))) {
    const started = performance.now()
    measured[part] = await parts[part](timing)
    console.error(`${part}: ${((performance.now() - started) / 1000).toFixed(0)} s`)
  }
  const sections = Object.values(measured)
  if (sections.length === 0) continue
  const fields = sections.flatMap((section) => section.fields)
  const measuredNames = [
    ...fields.flatMap(({ results }) => Object.values(results).flatMap((here) => Object.keys(here))),
    ...sections.flatMap((section) => section.names ?? []),
  ]
  const about = {}
  for (const name of measuredNames) about[name] ??= await describe(name)
  const versions = contenderVersions([...new Set(Object.values(about).flatMap(({ packages }) => packages))])
  const report = [
    `# ${title}`,
    '',
    `${machine}.`,
    '',
    `Versions: ${versions}.`,
    '',
    ...(INTRO[file] ?? []),
    ...(fields.length > 0 ? [summary(fields, about), contenderTable(about)] : []),
    ...sections.flatMap(({ fields, markdown }) => [...fields.map(tables), ...(markdown ? [markdown] : [])]),
  ].join('\n')
  console.log(report)

  const files = { [`${file}.md`]: report }
  if (file === 'results' && fields.length > 0) {
    const all = Object.entries(measured).map(([part, { fields, data }]) => [part, data ?? fields.map(compact)])
    const data = { machine, versions, rounds, ms, sections: Object.fromEntries(all) }
    Object.assign(files, { 'results.json': `${JSON.stringify(data)}\n` }, plots(data))
  }
  const isWhole = Object.keys(parts).every((part) => part in measured)
  if (!args.out && (!isWhole || quick || names)) continue
  for (const [name, text] of Object.entries(files)) writeFileSync(join(folder, name), text)
  hasWritten = true
}
if (hasWritten && !args.out) writeFigures()
