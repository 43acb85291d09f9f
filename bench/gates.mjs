// Compares the release build of a commit with that of an earlier one, in some 20 minutes. The exit code is 1 when a row is below its
// limit in gates.json.
//
//   npm run gates                           HEAD, and where its branch left main (on main: the commit before)
//   npm run gates -- --base REV --head REV  other commits, or the files of addons, which use the index.js of this tree
//   npm run gates -- --only ROW,…           some rows
//   npm run gates -- --update               writes the figures of the head into gates.json, for information: they limit nothing
//   npm run gates -- --rounds N --ms N      the number and the length of the rounds (default 14 and 170)
//
// A side is an addon with its own index.js; the code that measures both is this tree's. Commits are built in target/gates/<commit>, which
// is kept (some six minutes each, before the 20), without a profile: two profiles of the same code result in different addons.
//
// Both sides use the same servers, one at a time. A round is the base, the head, the head, and the base again, and the mean of both
// positions counts: a side may be faster when it runs second. Processes start again after half of the rounds, for hand-offs before each
// figure, because two processes of the same code differ. A ratio above 1 means that the head is better. The ratio of a row is the median of
// the ratios of its rounds: the figures of a round are a second apart, so a drift of the machine affects both, which the ratio of two
// medians would not cancel. The range in brackets is from the first to the third quartile. A row below its limit is measured once more
// at the end, with twice the rounds, and only the second result counts. With many such rows a run takes longer.
import { execFileSync } from 'node:child_process'
import {
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  realpathSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs'
import { join, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { installDependencies } from '../scripts/setup.mjs'
import { machine } from './report.mjs'
import { measureRows, ROWS } from './sections/gates.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))
const FILE = new URL('gates.json', import.meta.url)

/** Returns the rows of `--only`, all without it. */
export function rowsOf(only) {
  const names = only?.split(',') ?? Object.keys(ROWS)
  for (const name of names)
    if (!Object.hasOwn(ROWS, name))
      throw new Error(`--only ${name}: no such row; the rows are ${Object.keys(ROWS).join(', ')}`)
  return names
}

/** Returns the medians of a row's `rounds`, the quartiles of their ratios, and whether the median of the ratios is at least `least`. */
export function judge(rounds, isMoreBetter, least) {
  const quartiles = (figures) => {
    const sorted = figures.sort((one, other) => one - other)
    // Between two figures their mean counts.
    const at = (index) => (sorted[Math.floor(index)] + sorted[Math.ceil(index)]) / 2
    return [0.25, 0.5, 0.75].map((share) => at((sorted.length - 1) * share))
  }
  const [low, ratio, high] = quartiles(rounds.map(({ base, head }) => (isMoreBetter ? head / base : base / head)))
  const [base, head] = ['base', 'head'].map((side) => quartiles(rounds.map((round) => round[side]))[1])
  return { base, head, low, ratio, high, isGood: ratio >= least }
}

const git = (...args) =>
  execFileSync('git', args, { cwd: root, encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] }).trim()

/** Returns the commit where this branch left main; on main, and in a clone without it, the commit before. */
function earlier() {
  try {
    const base = git('merge-base', 'HEAD', 'main')
    if (base !== git('rev-parse', 'HEAD')) return base
  } catch {
    // A clone of one branch has no main.
  }
  return 'HEAD~1'
}

/** Returns the environment that makes a process use an addon, or the build of a commit. Prints which one it is. */
function environmentOf(side, given) {
  if (statSync(given, { throwIfNoEntry: false })?.isFile()) {
    console.log(`${side}: ${given}`)
    return { NAPI_RS_NATIVE_LIBRARY_PATH: resolve(given) }
  }
  let commit
  try {
    commit = git('rev-parse', '--verify', `${given}^{commit}`)
  } catch {
    throw new Error(`--${side} ${given}: neither a commit nor a file`)
  }
  console.log(`${side}: ${git('log', '-1', '--format=%h %s', commit)}`)
  const folder = join(root, 'target', 'gates', commit)
  if (!existsSync(folder)) build(commit, folder)
  const addon = readdirSync(folder).find((file) => /^holdfast\..*\.node$/.test(file)) ?? ''
  return { NAPI_RS_NATIVE_LIBRARY_PATH: join(folder, addon), HOLDFAST_BENCH_INDEX: join(folder, 'index.js') }
}

/** Builds a commit by its own script, with its own target folder: cargo would mix up the addons of two checkouts in one. */
function build(commit, folder) {
  const unfinished = `${folder}.unfinished`
  rmSync(unfinished, { recursive: true, force: true })
  mkdirSync(unfinished, { recursive: true })
  const archive = execFileSync('git', ['archive', commit], { cwd: root, maxBuffer: 2 ** 30 })
  execFileSync('tar', ['-xf', '-', '-C', unfinished], { input: archive })
  const env = { ...process.env, CARGO_TARGET_DIR: join(unfinished, 'target') }
  execFileSync(process.execPath, ['scripts/build.mjs', '--release'], { cwd: unfinished, stdio: ['ignore', 2, 2], env })
  for (const large of ['target', 'node_modules']) rmSync(join(unfinished, large), { recursive: true, force: true })
  renameSync(unfinished, folder)
}

const short = (figure) => Number(figure.toPrecision(4))

async function main() {
  const text = (value) => ({ type: /** @type {const} */ ('string'), default: value })
  const { values: args } = parseArgs({
    options: {
      base: { type: 'string' },
      head: text('HEAD'),
      only: { type: 'string' },
      update: { type: 'boolean' },
      rounds: text('14'),
      ms: text('170'),
    },
  })
  const [rounds, ms] = ['rounds', 'ms'].map((name) => {
    if (!/^[1-9]\d*$/.test(args[name])) throw new Error(`--${name} ${args[name]}: must be a whole number from 1 on`)
    return Number(args[name])
  })
  const names = rowsOf(args.only)
  if (args.update && args.only) throw new Error('--update needs all rows, which are of one machine: omit --only')
  if (args.head === 'HEAD' && git('status', '--porcelain', '--untracked-files=no'))
    console.error('Changes that are not committed are not measured.')

  installDependencies()
  installDependencies('bench')
  const sides = { base: environmentOf('base', args.base ?? earlier()), head: environmentOf('head', args.head) }
  const gates = JSON.parse(readFileSync(FILE, 'utf8'))
  const startedAt = performance.now()
  const results = await measureRows(names, sides, { rounds, ms })
  const judged = (name) => judge(results[name], ROWS[name].isMoreBetter, gates.rows[name].least)
  const below = names.filter((name) => !judged(name).isGood)
  if (below.length > 0) {
    console.error(`Once more, with twice the rounds: ${below.join(', ')}`)
    Object.assign(results, await measureRows(below, sides, { rounds: rounds * 2, ms }))
  }

  if (args.update) Object.assign(gates, { date: new Date().toISOString().slice(0, 10), machine })
  console.log(`\n| row | unit | base | head | ratio | at least | | ${gates.date}, ${gates.machine} |`)
  console.log('|---|---|---:|---:|---:|---:|---|---:|')
  for (const name of names) {
    const { base, head, low, ratio, high, isGood } = judged(name)
    const row = gates.rows[name]
    if (args.update) row.figure = short(head)
    const [from, mid, to] = [low, ratio, high].map((one) => one.toFixed(3))
    const cells = [short(base), short(head), `${mid} (${from}–${to})`, row.least, isGood ? 'ok' : 'BELOW']
    console.log(`| ${[name, ROWS[name].unit, ...cells, row.figure ?? ''].join(' | ')} |`)
    if (!isGood) process.exitCode = 1
  }
  console.log(`\n${names.length} rows in ${((performance.now() - startedAt) / 60_000).toFixed(1)} min`)
  if (args.update) writeFileSync(FILE, `${JSON.stringify(gates, null, 2)}\n`)
}

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) await main()
