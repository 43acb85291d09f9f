// Starts Redis, MongoDB, PostgreSQL, MariaDB, etcd and ZooKeeper servers for the tests, each on a free port and in a separate temporary
// folder. The binaries are on the PATH or are fetched (servers-cli.mjs).
//
//   node scripts/servers.mjs fetch              fetches the missing binaries, and prints their paths
//   node scripts/servers.mjs run -- CMD ARGS…   starts the servers, and runs a command with their URLs in its environment
//
// HOLDFAST_SERVERS_DIR=/a/folder                contains the servers' folders, instead of the system's temporary folder
import { spawn } from 'node:child_process'
import { closeSync, openSync, readFileSync, realpathSync, rmSync, writeFileSync } from 'node:fs'
import { mkdtemp, open, readdir, readFile, rm } from 'node:fs/promises'
import net from 'node:net'
import { tmpdir } from 'node:os'
import { basename, delimiter, dirname, join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { locateEtcd, startEtcd } from './etcd.mjs'
import { startMariadb } from './mysql.mjs'
import { startPgBouncer, startPostgres } from './postgres.mjs'
import { locateMariadb, locateMysql, locatePgBouncer, locatePostgres } from './sql-binaries.mjs'
import { redisCommand } from './redis-command.mjs'
import { STORES } from './rust-tests.mjs'
import { locateMongod, locateRedis, main } from './servers-cli.mjs'
import { startRedisCluster, startRedisQuorum, startRedisSentinel } from './topologies.mjs'
import { locateCurator, locateZookeeper, startZookeeper } from './zookeeper.mjs'

export { locateMongod, locateRedis }

const START_TIMEOUT_MS = 60_000

/**
 * Starts a Redis server without persistence. With `tls` it listens on `tlsPort`, too.
 *
 * @param {{ args?: string[], tls?: import('./certificates.mjs').RedisTls }} [options]
 */
export async function startRedis({ args = [], tls } = {}) {
  const path = await locateRedis()
  return startServer(async (dir, port) => {
    const tlsPort = tls ? await freePort() : 0
    const secure = tls?.settings(tlsPort).flatMap(([name, value]) => [`--${name}`, value]) ?? []
    // The default is 10 000 above the port, and may be the port of an outgoing connection.
    const hasDefaultBus = args.includes('--cluster-enabled') && !args.includes('--cluster-port')
    const bus = hasDefaultBus ? ['--cluster-port', String(await freePort())] : []
    const listen = ['--bind', '127.0.0.1', '--port', port, ...bus, ...secure]
    // Without this the first synchronisation of a replica waits for five seconds, longer than many leases.
    const replication = ['--repl-diskless-sync-delay', '0']
    return {
      argv: [path, ...listen, '--dir', dir, '--save', '', '--appendonly', 'no', ...replication, ...args],
      // The log is checked as well: another server on this port could answer the PING.
      ready: async (log) => /ready to accept connections/i.test(log) && answersPing(port),
      properties: { url: `redis://127.0.0.1:${port}`, tlsPort },
    }
  })
}

/**
 * Starts a standalone mongod, or with `replicaSet` the primary and only member of the set `rs0`. With `initiate: false` the
 * caller initiates the set. With `socketFolder` it has a Unix socket there.
 *
 * @param {{ replicaSet?: boolean, initiate?: boolean, socketFolder?: string, args?: string[] }} [options]
 */
export async function startMongod({ replicaSet = false, initiate = replicaSet, socketFolder = '', args = [] } = {}) {
  const path = await locateMongod()
  const driver = initiate ? await importDriver() : undefined
  return startServer((dir, port) => {
    const fast = ['ttlMonitorSleepSecs=1', 'shutdownTimeoutMillisForSignaledShutdown=100']
    const member = replicaSet ? ['--replSet', 'rs0', '--oplogSize', '128'] : []
    // By default the socket file would be in the temporary folder, and stay there after a kill.
    const socket = socketFolder ? ['--unixSocketPrefix', socketFolder] : ['--nounixsocket']
    const fixed = ['--bind_ip', '127.0.0.1', ...socket, '--dbpath', dir, '--wiredTigerCacheSizeGB', '0.25']
    return {
      argv: [
        path,
        '--port',
        port,
        ...fixed,
        ...fast.flatMap((parameter) => ['--setParameter', parameter]),
        ...member,
        ...args,
      ],
      ready: async (log) => /waiting for connections/i.test(log) && (!driver || isPrimary(driver, port)),
      properties: { url: `mongodb://127.0.0.1:${port}/holdfast${replicaSet ? '?replicaSet=rs0' : ''}` },
    }
  })
}

/**
 * Starts each server that the tests share, by the variable with its URL.
 *
 * @type {Record<string, () => Promise<{ url: string, stop: () => Promise<unknown> }>>}
 */
const SHARED_SERVERS = {
  HOLDFAST_TEST_REDIS_URL: () => startRedis(),
  HOLDFAST_TEST_REDIS_CLUSTER_URL: () => startRedisCluster(),
  HOLDFAST_TEST_REDIS_SENTINEL_URL: () => startRedisSentinel(),
  HOLDFAST_TEST_REDIS_QUORUM_URLS: () => startRedisQuorum(),
  HOLDFAST_TEST_MONGODB_URL: () => startMongod(),
  HOLDFAST_TEST_MONGODB_RS_URL: () => startMongod({ replicaSet: true }),
  HOLDFAST_TEST_POSTGRES_URL: () => startPostgres(),
  HOLDFAST_TEST_PGBOUNCER_URL: () => startPgBouncer(),
  HOLDFAST_TEST_MYSQL_URL: () => startMariadb(),
  HOLDFAST_TEST_ETCD_URL: () => startEtcd(),
  HOLDFAST_TEST_ZOOKEEPER_URL: () => startZookeeper(),
}

/**
 * Starts the shared servers whose variable is not set; with fewer stores than all, those whose variable has the name of one. Resolves
 * to all variables, and a function that stops the servers.
 * The PATH among them has a fetched `redis-server`, which Rust's tests start themselves.
 *
 * With `optional`, a server that cannot be started is left out.
 */
export async function testServers({ optional = false, stores = STORES } = {}) {
  const isOfStores = stores === STORES ? /./ : new RegExp(stores.join('|'), 'i')
  /** @type {{ stop: () => Promise<unknown> }[]} */
  const started = []
  const ports =
    process.env.HOLDFAST_TEST_PORTS ??
    (await mkdtemp(join(process.env.HOLDFAST_SERVERS_DIR || tmpdir(), 'holdfast-ports-')))
  const isOurs = process.env.HOLDFAST_TEST_PORTS === undefined
  process.env.HOLDFAST_TEST_PORTS = ports
  const stop = async () => {
    await Promise.all(started.map((server) => server.stop()))
    if (isOurs) await rm(ports, REMOVAL)
  }
  // Also if every variable is set. An error has the same cause as that of `startRedis`.
  const located = locateRedis().catch(() => undefined)
  const results = await Promise.allSettled(
    Object.entries(SHARED_SERVERS).map(async ([variable, start]) => {
      if (!isOfStores.test(variable)) return
      if (process.env[variable]) return [variable, process.env[variable]]
      try {
        const server = await start()
        started.push(server)
        return [variable, server.url]
      } catch (error) {
        if (!optional) throw error
        console.error(`${variable} is not set: ${error instanceof Error ? error.message : error}`)
      }
    }),
  )
  const failure = results.find((result) => result.status === 'rejected')
  if (failure) {
    await stop()
    throw failure.reason
  }
  const env = Object.fromEntries(
    results.flatMap((result) => (result.status === 'fulfilled' && result.value ? [result.value] : [])),
  )
  env.HOLDFAST_TEST_PORTS = ports
  const redis = await located
  if (redis) env.PATH = [dirname(redis), process.env.PATH].join(delimiter)
  return { env, stop }
}

/** @type {Set<Server>} */
const running = new Set()

process.on('exit', () => {
  for (const server of running) server.killNow()
})

/**
 * Starts a server in a new folder and on a free port. `plan(dir, port)` returns `argv`, `ready(log)`, and the `properties` of
 * the result; the `user` that runs it, and the signals that stop it and end it for a restart, if they are not the usual ones. The
 * server's own processes are paused with it.
 *
 * @typedef {{ uid: number, gid: number }} User
 * @typedef {{ argv: string[], user?: User, stopSignal?: NodeJS.Signals, restartSignal?: NodeJS.Signals, ready: (log: string) => Promise<boolean>, properties: { url?: string, tlsPort?: number, socket?: string } }} Plan
 * @param {(dir: string, port: string) => Plan | Promise<Plan>} plan
 */
export async function startServer(plan) {
  for (let attempt = 1; ; attempt++) {
    const dir = await mkdtemp(join(process.env.HOLDFAST_SERVERS_DIR || tmpdir(), 'holdfast-'))
    const port = await freePort()
    const server = new Server(dir, port)
    try {
      return await server.start(await plan(dir, String(port)))
    } catch (error) {
      await server.stop()
      // Another process may use the port by now.
      if (attempt === 5 || !/address already in use/i.test(String(error))) throw error
    }
  }
}

// A guard process kills the server when this process ends in any way: its input ends then. Exit hooks do not run after a signal
// or a crash, and signal handlers would change the behaviour of the process under test.
const GUARD = 'read -r _; read -r pid <"$0/pid" && kill -9 "$pid"; rm -rf "$0" || { sleep 1; rm -rf "$0"; }'
const REMOVAL = { recursive: true, force: true, maxRetries: 20, retryDelay: 50 }

class Server {
  /** Its URL, from the plan. */
  url = ''
  /** The port for TLS, from the plan; 0 without TLS. */
  tlsPort = 0
  /** Its Unix socket, or the folder of the socket, from the plan; empty without one. */
  socket = ''
  #dir
  /** @type {Plan} */
  #plan = { argv: [], ready: async () => false, properties: {} }
  #guard
  /** @type {import('node:child_process').ChildProcess | undefined} */
  #child
  /** @type {Promise<unknown>} */
  #exited = Promise.resolve()
  #isStopped = false
  /** @type {string[]} */
  #more = []

  /** @param {string} dir @param {number} port */
  constructor(dir, port) {
    this.#dir = dir
    this.port = port
    this.#guard = spawn('sh', ['-c', GUARD, dir], { stdio: ['pipe', 'ignore', 'ignore'], detached: true })
    this.#guard.unref()
    // A pipe, which is a socket.
    const input = /** @type {import('node:net').Socket} */ (this.#guard.stdin)
    input.unref()
    running.add(this)
  }

  get pid() {
    return this.#child?.pid
  }

  get #isUp() {
    return this.#child !== undefined && this.#child.exitCode === null && this.#child.signalCode === null
  }

  /** @param {Plan} plan */
  async start(plan) {
    this.#plan = plan
    Object.assign(this, plan.properties)
    await this.#launch()
    return this
  }

  /** Stops the server and removes its folder. */
  async stop() {
    this.#isStopped = true
    await this.#end(this.#plan.stopSignal ?? 'SIGKILL')
    await rm(this.#dir, REMOVAL)
    this.#guard.kill('SIGKILL')
    running.delete(this)
  }

  /** Kills the server. The folder stays: `restart()` finds the data that was written to the disk. */
  async kill() {
    await this.#end(this.#plan.stopSignal ?? 'SIGKILL')
  }

  async pause() {
    if (!this.#isUp) return
    this.#child?.kill('SIGSTOP')
    // On a busy machine a thread may continue for a moment after the signal was sent.
    while (this.#isUp && !(await isStopped(this.pid))) await sleep(1)
    for (const pid of childrenOf(this.pid)) signal(pid, 'SIGSTOP')
  }

  resume() {
    if (!this.#isUp) return
    for (const pid of childrenOf(this.pid)) signal(pid, 'SIGCONT')
    this.#child?.kill('SIGCONT')
  }

  /**
   * Shuts the server down if it is up, and starts it on the same port and folder. `more`: arguments in addition to those of the first
   * start, also for later restarts.
   *
   * @param {string[]} more
   */
  async restart(more = this.#more) {
    if (this.#isStopped) throw new Error('this server has been stopped: start a new one')
    this.#more = more
    await this.#end(this.#plan.restartSignal ?? 'SIGTERM')
    for (let attempt = 1; ; attempt++) {
      try {
        return await this.#launch()
      } catch (error) {
        // An outgoing connection or another program may use the port for a moment.
        if (attempt === 10 || !/address already in use/i.test(String(error))) throw error
        await sleep(200)
      }
    }
  }

  /** Kills the server synchronously, for the exit hook. */
  killNow() {
    try {
      if (this.#isUp) this.#child?.kill('SIGKILL')
      rmSync(this.#dir, REMOVAL)
    } catch {
      // The guard retries. An error thrown here would hide why the process ends.
    }
  }

  async #launch() {
    const [path, ...args] = this.#plan.argv
    const [logFile, pidFile] = [join(this.#dir, 'log'), join(this.#dir, 'pid')]
    const log = openSync(logFile, 'w')
    // A separate session: otherwise Ctrl-C in the terminal stops the server before the tests.
    const child = spawn(path, [...args, ...this.#more], {
      cwd: this.#dir,
      stdio: ['ignore', log, log],
      detached: true,
      ...this.#plan.user,
    })
    closeSync(log)
    child.unref()
    this.#child = child
    this.#exited = new Promise((resolve) => child.once('exit', resolve).once('error', resolve))
    this.#exited.then(() => rmSync(pidFile, { force: true }))
    writeFileSync(pidFile, `${child.pid}\n`)

    const deadline = Date.now() + START_TIMEOUT_MS
    const readLog = () => readFileSync(logFile, 'utf8')
    while (!(await this.#plan.ready(readLog()))) {
      const failure = !this.#isUp ? 'ended while starting' : Date.now() > deadline && 'does not become ready'
      if (failure) throw new Error(`${basename(path)} ${failure}. From its log:\n${errorLines(readLog())}`)
      await sleep(20)
    }
  }

  /** @param {NodeJS.Signals} signal */
  async #end(signal) {
    const child = this.#child
    if (!child || !this.#isUp) return
    child.ref()
    child.kill(signal)
    // A stopped process does not handle SIGTERM.
    this.resume()
    const killTimer = setTimeout(() => child.kill('SIGKILL'), 10_000)
    await this.#exited
    clearTimeout(killTimer)
  }
}

/**
 * Returns whether a suspended process has stopped. Only Linux shows the state of each thread; elsewhere it waits half a second.
 *
 * @param {number | undefined} pid
 */
export async function isStopped(pid) {
  const threads = await readdir(`/proc/${pid}/task`).catch(() => [])
  if (threads.length === 0) await sleep(500)
  const stats = await Promise.all(
    threads.map((thread) => readFile(`/proc/${pid}/task/${thread}/stat`, 'utf8').catch(() => ') T')),
  )
  return stats.every((stat) => /.*\) T/s.test(stat))
}

/** Returns the processes of a server. Only Linux shows them. @param {number | undefined} pid */
function childrenOf(pid) {
  try {
    return readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8').split(' ').filter(Boolean).map(Number)
  } catch {
    return []
  }
}

/** @param {number} pid @param {NodeJS.Signals} name */
function signal(pid, name) {
  try {
    process.kill(pid, name)
  } catch {
    // It has ended.
  }
}

// mongod logs many lines about its shutdown after an error.
/** @param {string} log */
function errorLines(log) {
  const lines = log.trim().split('\n')
  const errors = lines.filter((line) => /"s":"[EF]"/.test(line))
  return (errors.length > 0 ? errors : lines).slice(-10).join('\n')
}

/** The ports that this process has returned. */
const given = new Set()

/**
 * Whether no process of this run was given this port before: a server that restarts keeps its port meanwhile. `testServers` sets the folder,
 * which has a file for each port.
 *
 * @param {number} port
 */
async function isNew(port) {
  if (given.has(port)) return false
  given.add(port)
  const folder = process.env.HOLDFAST_TEST_PORTS
  if (!folder) return true
  return open(join(folder, String(port)), 'wx').then(
    async (file) => (await file.close(), true),
    (error) => error.code !== 'EEXIST',
  )
}

// Below the ephemeral ports: a client that keeps connecting to a closed ephemeral port connects to itself in the end, and the
// restarted server cannot use the port.
export async function freePort() {
  for (;;) {
    const port = 15_000 + Math.floor(Math.random() * 15_000)
    const probe = net.createServer()
    const isFree = await new Promise((resolve) => {
      probe.once('error', () => resolve(false)).listen(port, '127.0.0.1', () => resolve(true))
    })
    await new Promise((resolve) => probe.close(resolve))
    if (isFree && (await isNew(port))) return port
  }
}

// A server with a password rejects the PING, and is up.
/** @param {string} port */
export const answersPing = (port) =>
  redisCommand(port, 'PING').then(
    (reply) => reply === '+PONG\r\n',
    ({ message }) => message.startsWith('-NOAUTH'),
  )

// Imported for replica sets only: other servers need no npm package.
export const importDriver = () =>
  import('mongodb').catch((cause) => {
    throw new Error('initiating a replica set needs the npm package mongodb: run npm install', { cause })
  })

// Initiates the set each time: an initiated set answers with an error, which is ignored.
/** @param {typeof import('mongodb')} driver @param {string} port */
async function isPrimary({ MongoClient }, port) {
  const client = new MongoClient(`mongodb://127.0.0.1:${port}/?directConnection=true`, {
    serverSelectionTimeoutMS: 2000,
  })
  try {
    const admin = client.db('admin')
    const config = { _id: 'rs0', members: [{ _id: 0, host: `127.0.0.1:${port}` }] }
    await admin.command({ replSetInitiate: config }).catch(() => {})
    return (await admin.command({ hello: 1 })).isWritablePrimary === true
  } catch {
    return false
  } finally {
    await client.close()
  }
}

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  const sql = [locatePostgres, locatePgBouncer, locateMariadb, locateMysql]
  const locators = [locateRedis, locateMongod, ...sql, locateEtcd, locateZookeeper, locateCurator]
  process.exitCode = await main(process.argv.slice(2), testServers, locators)
}
