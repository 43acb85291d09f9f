// Measures every contender in one run, in separate processes, alternately, in several rounds; the figures are medians.
//
//   npm run bench                          writes bench/results.md, results.json, results.svg and results-loop.svg
//   npm run bench -- --only pairs,tries    some sections: prints them, and writes nothing
//   npm run bench -- --rounds N --ms N     the number and the length of the rounds
//   npm run bench -- --out FOLDER          writes into another folder, with --only, too
//   npm run bench -- --quick               a smoke test: every contender works; prints, and writes nothing
//
// Uses the addon in NAPI_RS_NATIVE_LIBRARY_PATH if set.
import { mkdirSync, writeFileSync } from 'node:fs'
import { cpus } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { installDependencies } from '../scripts/setup.mjs'
import { releaseBuild } from './build.mjs'

const SECTIONS = ['pairs', 'delayed', 'tries', 'quorum', 'footprint']

const { values: args } = parseArgs({
  options: {
    quick: { type: 'boolean', default: false },
    only: { type: 'string' },
    rounds: { type: 'string' },
    ms: { type: 'string' },
    out: { type: 'string' },
  },
})
const { quick } = args
const chosen = args.only?.split(',') ?? SECTIONS
const number = (name, usual) => {
  const value = Number(args[name] ?? usual)
  if (!Number.isInteger(value) || value < 1)
    throw new Error(`--${name} ${args[name]}: must be a whole number from 1 on`)
  return value
}
const rounds = number('rounds', quick ? 1 : 7)
const ms = number('ms', quick ? 40 : 800)
// With one call at a time V8 needs this long to optimise the code.
const timing = { rounds, ms, warmUpMs: quick ? 40 : 1500 }
for (const name of chosen)
  if (!SECTIONS.includes(name)) throw new Error(`--only ${name}: one of ${SECTIONS.join(', ')}`)

installDependencies()
installDependencies('bench')
// The addon next to index.js may be a debug build: figures need a release build.
if (!quick) process.env.NAPI_RS_NATIVE_LIBRARY_PATH ??= await releaseBuild()

// These import drivers, which are installed by now.
const { ALL } = await import('./sections/stores.mjs')
const { compact, contenderVersions, tables } = await import('./report.mjs')
const { contenderTable, summary } = await import('./summary.mjs')
const { plots } = await import('./plot.mjs')

const about = {}
for (const module of ALL) about[module] = await import(`./contenders/${module}.mjs`)

const measured = {}
for (const name of SECTIONS.filter((section) => chosen.includes(section))) {
  const started = performance.now()
  const { [name]: measure } = await import(`./sections/${name}.mjs`)
  measured[name] = await measure({ ...timing, quick, about })
  console.error(`${name}: ${((performance.now() - started) / 1000).toFixed(0)} s`)
}

const fields = Object.values(measured).flatMap((section) => section.fields)
const machine = `${cpus().length} × ${cpus()[0].model}, Node ${process.version}`
const versions = contenderVersions([...new Set(Object.values(about).flatMap(({ packages }) => packages))])
const report = [
  '# Benchmark',
  '',
  `${machine}, servers on loopback. ${rounds} rounds of ${ms} ms per cell, interleaved; medians, with the range in ` +
    'brackets. A pair is one acquire and one release of a free name. The method is in [README.md](README.md).',
  '',
  'On a standalone MongoDB the writes of holdfast wait for the journal (`w=majority`). The others’ do not, which is the ' +
    'driver’s default. On the replica set all write with `w=majority`; it has one member, so a majority is the journal of ' +
    'that member, and nothing is replicated.',
  '',
  `Versions: ${versions}.`,
  '',
  ...(fields.length > 0 ? [summary(fields, about)] : []),
  contenderTable(about),
  ...Object.values(measured).flatMap(({ fields, markdown }) => [
    ...fields.map(tables),
    ...(markdown ? [markdown] : []),
  ]),
].join('\n')
console.log(report)

const data = {
  machine,
  versions,
  rounds,
  ms,
  sections: Object.fromEntries(
    Object.entries(measured).map(([name, { fields, data }]) => [name, data ?? fields.map(compact)]),
  ),
}
const files = { 'results.md': report, 'results.json': `${JSON.stringify(data)}\n`, ...plots(data) }
if (args.out || (!quick && chosen.length === SECTIONS.length)) {
  const folder = args.out ?? fileURLToPath(new URL('.', import.meta.url))
  mkdirSync(folder, { recursive: true })
  for (const [name, text] of Object.entries(files)) writeFileSync(join(folder, name), text)
}
