// `npm test`: sets up, builds the addon, brings up the servers, runs the Rust and the Node tests on every store, and ends
// with a count.
import { execFileSync, spawn } from 'node:child_process'
import { mkdtempSync, readdirSync, readFileSync, rmSync, statfsSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath, pathToFileURL } from 'node:url'
import { installDependencies } from './setup.mjs'
import { SHARED, testServers } from './servers.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))

/**
 * Runs a command with its output shown, or those lines of it that `shows` says; gives its exit code and what it printed to
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

/** Leaves out what tests print that pass, and their names once more: what has failed is hard to find behind it. */
function leaveOutSuccesses() {
  let isLeftOut = false
  return (line) => {
    if (line === 'successes:') isLeftOut = true
    else if (line === 'failures:' || line.startsWith('test result:')) isLeftOut = false
    return !isLeftOut
  }
}

async function rustTests(env) {
  const features = ['--no-default-features', '--features', 'memory,sqlite,redis,mongodb']
  // napi builds the addon for an explicit target, which cargo keeps apart: the same one here, or all crates compile twice.
  const [, target] = /^host: (.*)$/m.exec(execFileSync('rustc', ['-vV'], { encoding: 'utf8' }))
  // With what the tests print: one that finds no server passes, and says so, which is counted below.
  const args = ['test', '--target', target, ...features, '--', '--show-output']
  const { code, output } = await run('cargo', args, { ...env, RUST_BACKTRACE: '0' }, leaveOutSuccesses())
  const failed = sum(output, /^test result: .* (\d+) failed;/gm)
  const unserved = [...output.matchAll(/^---- (\S+) stdout ----\r?\nskipped: (.*)$/gm)]
  const ignored = [...output.matchAll(/^test (\S+) \.\.\. ignored(?:, )?(.*)$/gm)]
  return {
    passed: sum(output, /^test result: \w+\. (\d+) passed;/gm) - unserved.length,
    // A build that fails, or a run that dies, has no line to count.
    failed: failed === 0 && code !== 0 ? 1 : failed,
    skipped: [...unserved, ...ignored].map(([, name, why]) => `${name}: ${why}`),
  }
}

async function nodeTests(env) {
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-test-'))
  const tap = join(folder, 'tap')
  const specs = readdirSync(join(root, '__test__')).filter((name) => name.endsWith('.spec.mjs'))
  const reporters = ['spec', 'stdout', 'tap', tap]
  const { code } = await run(
    process.execPath,
    [
      '--test',
      '--test-concurrency=2',
      // A process that does not end is a failure, too.
      '--test-timeout=600000',
      ...reporters.map((value, i) => (i % 2 === 0 ? `--test-reporter=${value}` : `--test-reporter-destination=${value}`)),
      ...specs.map((name) => `__test__/${name}`),
    ],
    env,
  )
  const report = readFileSync(tap, 'utf8')
  rmSync(folder, { recursive: true })
  const count = (word) => sum(report, new RegExp(`^# ${word} (\\d+)$`, 'gm'))
  const failed = count('fail') + count('cancelled')
  return {
    passed: count('pass'),
    failed: failed === 0 && code !== 0 ? 1 : failed,
    skipped: [...report.matchAll(/^\s*ok \d+ - (.*) # SKIP ?(.*)$/gm)].map(([, name, why]) => `${name}: ${why}`),
  }
}

/** The servers, or on a laptop those of them that can be had: what needs another one is then skipped, and says so. */
async function bringUp() {
  if (process.env.CI) return testServers()
  const [env, servers] = [{}, []]
  await Promise.all(
    Object.entries(SHARED).map(async ([variable, start]) => {
      if (process.env[variable]) return
      try {
        const server = await start()
        servers.push(server)
        env[variable] = server.url
      } catch (error) {
        console.error(`${variable} stays empty: ${error.message}`)
      }
    }),
  )
  return { env, stop: () => Promise.all(servers.map((server) => server.stop())) }
}

/**
 * Where the servers keep their data: in memory where there is room for it (5 GiB). A disk that stands still for two seconds
 * makes a mongod answer no sooner, and leases of the tests are not much longer than that.
 */
export function serversDir() {
  const memory = '/dev/shm'
  try {
    const { bavail, bsize } = statfsSync(memory)
    if (bavail * bsize >= 5 * 2 ** 30) return memory
  } catch {
    // There is none.
  }
  return tmpdir()
}

/** Runs everything; gives the number of failures. */
export async function test({ build = true } = {}) {
  // For the servers of this process and of those that the tests are.
  process.env.HOLDFAST_SERVERS_DIR ||= serversDir()
  installDependencies()
  // Two specs want these, and must not install them at the same time.
  installDependencies('bench')
  if (build && (await run(process.execPath, ['scripts/build.mjs'])).code !== 0) throw new Error('the addon does not build')
  const servers = await bringUp()
  try {
    const results = [await rustTests(servers.env), await nodeTests(servers.env)]
    const skipped = results.flatMap((result) => result.skipped)
    const total = (field) => results.reduce((count, result) => count + result[field], 0)
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
