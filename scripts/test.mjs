// `npm test`: installs dependencies, builds the addon, starts the servers, runs the Rust and the Node tests on every store, and
// prints a count at the end.
import { spawn } from 'node:child_process'
import { readdirSync } from 'node:fs'
import { availableParallelism } from 'node:os'
import { basename, join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath, pathToFileURL } from 'node:url'
import { runTests } from './node-tests.mjs'
import { hostTarget } from './pgo.mjs'
import { installDependencies, serversDir } from './setup.mjs'
import { testServers } from './servers.mjs'
import { printSteps, step } from './steps.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))
const LONGEST_SHOWN = 12

/**
 * Runs a command, and prints its output, or only the lines for which `shows` returns true. Resolves to its exit code and its
 * stdout.
 */
export function run(command, args, env = {}, shows) {
  return new Promise((resolve, reject) => {
    const child = spawn(command, args, {
      cwd: root,
      env: { ...process.env, ...env },
      stdio: ['ignore', 'pipe', 'inherit'],
      shell: process.platform === 'win32' && command === 'npm',
    })
    let output = ''
    child.stdout.on('data', (chunk) => {
      output += chunk
      if (!shows) process.stdout.write(chunk)
    })
    if (shows) createInterface(child.stdout).on('line', (line) => shows(line) && console.log(line))
    child.on('error', reject)
    child.on('close', (code) => resolve({ code, output }))
  })
}

const sum = (text, pattern) => [...text.matchAll(pattern)].reduce((total, [, count]) => total + Number(count), 0)

/** Omits the output of tests that pass and the second list of their names, so that failures are easy to find. */
function leaveOutSuccesses() {
  let isLeftOut = false
  return (line) => {
    if (line === 'successes:') isLeftOut = true
    else if (line === 'failures:' || line.startsWith('test result:')) isLeftOut = false
    return !isLeftOut
  }
}

/** Tests of models keep the cores busy for minutes, which would delay the others: they run separately. */
const MODELS = '::model::'
/** The others wait for servers and leases most of the time: two threads per core. */
const RUST_THREADS = 2 * availableParallelism()

async function rustTests(env) {
  // napi builds the addon for an explicit target, which has a separate folder: the same target here avoids a second build.
  // Without `--lib` cargo builds the library again for documentation tests, of which there are none.
  const args = [
    'test',
    '--lib',
    '--target',
    hostTarget,
    '--no-default-features',
    '--features',
    'memory,sqlite,redis,mongodb,node',
  ]
  const { code: built } = await step('build of the Rust tests', () => run('cargo', [...args, '--no-run']))
  if (built !== 0) return [{ passed: 0, failed: 1, skipped: [] }]
  // With the tests' output: a test without a server passes and prints `skipped: `, which is counted below.
  const part = async (...selected) => {
    const runs = [...args, '--', '--show-output', ...selected]
    return rustCounts(await run('cargo', runs, { ...env, RUST_BACKTRACE: '0' }, leaveOutSuccesses()))
  }
  return [
    await step('Rust tests of models', () => part(MODELS)),
    await step('Rust tests', () => part('--skip', MODELS, `--test-threads=${RUST_THREADS}`)),
  ]
}

function rustCounts({ code, output }) {
  const failed = sum(output, /^test result: .* (\d+) failed;/gm)
  const unserved = [...output.matchAll(/^---- (\S+) stdout ----\r?\nskipped: (.*)$/gm)]
  const ignored = [...output.matchAll(/^test (\S+) \.\.\. ignored(?:, )?(.*)$/gm)]
  return {
    passed: sum(output, /^test result: \w+\. (\d+) passed;/gm) - unserved.length,
    // An aborted run prints no result.
    failed: failed === 0 && code !== 0 ? 1 : failed,
    skipped: [...unserved, ...ignored].map(([, name, why]) => `${name}: ${why}`),
  }
}

/** Specs that keep a core busy: they would delay the others, and run one at a time after them. */
const BUSY = /^(bench|.*bursts?|bursts-.*|.*-stall|mongodb-rolling-deployment)\.spec\.mjs$/
/** Specs that run for a minute or more: they start first, so that none of them runs alone at the end. */
const LONG = [
  'processes',
  'mongodb-failover-load',
  'mongodb-failover',
  'lost-replies',
  'mongodb-security',
  'redis-sentinel',
  'mongodb-permissions',
  'outage',
]
/** The other specs wait most of the time: three of them need about one core. */
const CONCURRENCY = 3

async function nodeTests() {
  const specs = readdirSync(join(root, '__test__')).filter((name) => name.endsWith('.spec.mjs'))
  // Specs that are not listed have the largest rank.
  const rank = (name) => LONG.indexOf(name.replace('.spec.mjs', '')) >>> 0
  const calm = specs.filter((name) => !BUSY.test(name)).sort((one, other) => rank(one) - rank(other))
  const paths = (names) => names.map((name) => join(root, '__test__', name))
  const parts = [
    await step('Node tests', () => runTests(paths(calm), CONCURRENCY)),
    await step('Node tests that keep a core busy', () => runTests(paths(specs.filter((name) => BUSY.test(name))), 1)),
  ]
  const seconds = parts.flatMap((part) => [...part.seconds]).sort((one, other) => other[1] - one[1])
  console.log('\nThe longest specs:')
  for (const [file, took] of seconds.slice(0, LONGEST_SHOWN))
    console.log(`${took.toFixed(1).padStart(9)} s  ${basename(file)}`)
  return parts
}

/** Runs all tests. Resolves to the number of failures. The count is the last line of the output. */
export async function test({ build = true } = {}) {
  process.chdir(root)
  // For the servers of this process and of the test processes.
  process.env.HOLDFAST_SERVERS_DIR ||= serversDir()
  installDependencies()
  // Two specs need these, and must not install them at the same time.
  installDependencies('bench')
  if (build) {
    const { code } = await step('addon', () => run(process.execPath, ['scripts/build.mjs']))
    if (code !== 0) throw new Error('the addon does not build')
  }
  // Outside of CI the tests that need a missing server are skipped.
  const servers = await step('servers', () => testServers({ optional: !process.env.CI }))
  // The specs are processes of the test runner, which inherit this environment.
  Object.assign(process.env, servers.env)
  try {
    const results = [...(await rustTests(servers.env)), ...(await nodeTests())]
    const skipped = results.flatMap((result) => result.skipped)
    const total = (field) => results.reduce((count, result) => count + result[field], 0)
    printSteps()
    console.log()
    for (const line of skipped) console.log(`skipped: ${line}`)
    console.log(`${total('passed')} passed, ${total('failed')} failed, ${skipped.length} skipped`)
    return total('failed')
  } finally {
    await servers.stop()
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  process.exitCode = (await test({ build: !process.argv.includes('--no-build') })) === 0 ? 0 : 1
}
