// `npm run mutants`: shows that the tests find serious faults. Plants each fault of mutants.json in a copy of the source files, one at a
// time, and runs the test that has to fail.
//
//   npm run mutants                    all of them
//   npm run mutants -- redis minHold   those whose names contain one of these texts, in any case
//
// The copy and its builds stay in `target/mutants`: the first run builds everything, a later one only what has changed.
import { execFileSync, spawnSync } from 'node:child_process'
import { existsSync, mkdirSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { hostTarget } from './pgo.mjs'
import { featuresOf, rustCounts, STORES } from './rust-tests.mjs'
import { testServers } from './servers.mjs'
import { installDependencies, serversDir } from './setup.mjs'
import { checkMutants, readMutants } from './structure.mjs'

/** @typedef {import('./structure.mjs').Mutant} Mutant */
/** @typedef {{ passed: number, failed: number, hangs: boolean, output: string }} Result */

const root = fileURLToPath(new URL('..', import.meta.url))
const folder = join(root, 'target', 'mutants')
const tree = join(folder, 'tree')
/** These are links to the user's. A lock file that is newer than the packages would make a build install them. */
const LINKED = ['node_modules', '.servers', 'package-lock.json']
/** A test that takes longer hangs. */
const LONGEST_TEST_MS = 300_000

/** Copies the source files that differ, so that cargo builds only what has changed. */
function copyTree() {
  const listed = execFileSync('git', ['ls-files', '-z', '--cached', '--others', '--exclude-standard'], { cwd: root })
  const files = listed.toString().split('\0')
  const sources = files.filter((file) => file && !LINKED.includes(file) && existsSync(join(root, file)))
  const list = join(folder, 'files.json')
  const earlier = existsSync(list) ? JSON.parse(readFileSync(list, 'utf8')) : []
  for (const file of earlier) if (!sources.includes(file)) rmSync(join(tree, file), { force: true })
  for (const file of sources) {
    const [content, copy] = [readFileSync(join(root, file)), join(tree, file)]
    if (existsSync(copy) && content.equals(readFileSync(copy))) continue
    mkdirSync(dirname(copy), { recursive: true })
    writeFileSync(copy, content)
  }
  for (const name of LINKED.filter((name) => existsSync(join(root, name)) && !existsSync(join(tree, name))))
    symlinkSync(join(root, name), join(tree, name))
  writeFileSync(list, JSON.stringify(sources))
}

/** Runs a command in the copy. @param {string} command @param {string[]} args @param {number} [timeout] */
function execute(command, args, timeout) {
  const builds = { CARGO_TARGET_DIR: join(folder, 'build'), CARGO_INCREMENTAL: '1' }
  const env = { ...process.env, ...builds, RUST_BACKTRACE: '0' }
  const limits = /** @type {const} */ ({ timeout, killSignal: 'SIGKILL', maxBuffer: 2 ** 30 })
  const { status, error, stdout, stderr } = spawnSync(command, args, { cwd: tree, env, encoding: 'utf8', ...limits })
  const hangs = /** @type {NodeJS.ErrnoException | undefined} */ (error)?.code === 'ETIMEDOUT'
  if (error && !hangs) throw error
  return { code: status, hangs, stdout, output: stdout + stderr }
}

/** @typedef {(mutants: Mutant[]) => Result} Run runs the tests of mutants */

/** Builds the Rust tests. Returns the errors, or what runs tests. @returns {string | Run} */
function buildRust() {
  const selected = ['--lib', '--target', hostTarget, '--no-default-features', '--features', featuresOf(STORES)]
  const args = ['test', '--no-run', ...selected, '--message-format', 'json-render-diagnostics']
  const { code, output, stdout } = execute('cargo', args)
  if (code !== 0) return output
  const executable = JSON.parse(/"executable":("(?:[^"\\]|\\.)+")/.exec(stdout)?.[1] ?? '""')
  return (mutants) => {
    const tests = mutants.map(({ test }) => test)
    const run = execute(executable, ['--exact', '--show-output', ...tests], LONGEST_TEST_MS * tests.length)
    return { ...run, ...rustCounts(run) }
  }
}

/** Builds the addon and `lib/`. Returns the errors, or what runs a test. @returns {string | Run} */
function buildNode() {
  const { code, output } = execute(process.execPath, ['scripts/build.mjs'])
  if (code !== 0) return output
  return ([{ spec = '', test }]) => {
    const name = test.replace(/[^\w ]/g, '\\$&')
    const args = ['--test', '--test-reporter=tap', `--test-name-pattern=^${name}$`, spec]
    const run = execute(process.execPath, args, LONGEST_TEST_MS)
    const count = (/** @type {string} */ start) =>
      run.output.match(new RegExp(`^ *${start} \\d+ - ${name}$`, 'gm'))?.length ?? 0
    return { ...run, passed: count('ok'), failed: count('not ok') }
  }
}

/**
 * Runs the tests without a mutant, in one command if there may be several, then each with its mutant. Returns the number of mutants that
 * survive.
 *
 * @param {Mutant[]} mutants
 * @param {() => string | Run} build
 * @param {boolean} areTogether
 */
function tryOut(mutants, build, areTogether) {
  if (mutants.length === 0) return 0
  const original = build()
  if (typeof original === 'string') throw new Error(`the build fails without a mutant:\n${original}`)
  for (const tests of areTogether ? [mutants] : mutants.map((mutant) => [mutant])) {
    const { passed, failed, output } = original(tests)
    const count = new Set(tests.map(({ test }) => test)).size
    if (failed > 0 || passed !== count) throw new Error(`not each test passes without a mutant:\n${output}`)
  }
  return mutants.filter((mutant) => {
    const [startedAt, path] = [performance.now(), join(tree, mutant.file)]
    const text = readFileSync(path, 'utf8')
    writeFileSync(
      path,
      text.replace(mutant.line, () => mutant.becomes),
    )
    const built = build()
    const result = typeof built === 'string' ? undefined : built([mutant])
    writeFileSync(path, text)
    const isCaught = result !== undefined && result.failed > 0 && !result.hangs
    const why =
      result === undefined ? `it does not build:\n${built}` : result.hangs ? 'its test hangs' : 'its test passes'
    const seconds = ((performance.now() - startedAt) / 1000).toFixed(1).padStart(6)
    console.log(`${seconds} s  ${mutant.name}: ${isCaught ? `caught by ${mutant.test}` : `NOT CAUGHT, ${why}`}`)
    return !isCaught
  }).length
}

const problems = checkMutants(root)
if (problems.length > 0) throw new Error(problems.join('\n'))
const texts = process.argv.slice(2).map((text) => text.toLowerCase())
const isSelected = (/** @type {Mutant} */ { name }) =>
  texts.length === 0 || texts.some((text) => name.toLowerCase().includes(text))
const selected = readMutants(root).filter(isSelected)
installDependencies()
process.env.HOLDFAST_SERVERS_DIR ||= serversDir()
const servers = await testServers({ optional: !process.env.CI })
Object.assign(process.env, servers.env)
try {
  copyTree()
  const [inNode, inRust] = [selected.filter(({ spec }) => spec), selected.filter(({ spec }) => !spec)]
  const survivors = tryOut(inRust, buildRust, true) + tryOut(inNode, buildNode, false)
  console.log(`${selected.length - survivors} of ${selected.length} mutants caught`)
  if (survivors > 0 || selected.length === 0) process.exitCode = 1
} finally {
  await servers.stop()
}
