// Real Redis and MongoDB servers for the tests of whoever has none at hand, each on a free port and in a temp folder of
// its own. The binaries come from the PATH or are fetched: servers-cli.mjs knows how.
//
//   node scripts/servers.mjs fetch              make sure that both binaries exist, print where
//   node scripts/servers.mjs run -- CMD ARGS…   run a command with the test URLs in its environment
//
// HOLDFAST_SERVERS_DIR=/a/folder                where their folders are made, in place of the system's for temporary files
import { spawn } from 'node:child_process'
import { closeSync, openSync, readFileSync, realpathSync, rmSync, writeFileSync } from 'node:fs'
import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises'
import net from 'node:net'
import { tmpdir } from 'node:os'
import { basename, join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import tls from 'node:tls'
import { fileURLToPath } from 'node:url'
import { certify, makeAuthority } from './certificates.mjs'
import { locateMongod, locateRedis, main } from './servers-cli.mjs'
import { startRedisCluster, startRedisSentinel } from './topologies.mjs'

export { locateMongod, locateRedis }

const START_TIMEOUT_MS = 60_000

/** Starts a Redis that keeps nothing on disk; with `tls` it serves `rediss://` under a CA made for it (`caPath`). */
export async function startRedis({ args = [], tls: secure = false } = {}) {
  const { path, env } = await locateRedis()
  return startServer(async (dir, port) => {
    const files = secure ? { ca: await makeAuthority(dir), ...(await certify(dir, 'server')) } : {}
    const identity = ['--tls-ca-cert-file', files.ca, '--tls-cert-file', files.cert, '--tls-key-file', files.key]
    // A server waits five seconds for more replicas before it copies itself to the first: with a lease of seconds, a long time.
    const copying = ['--repl-diskless-sync-delay', '0']
    const listen = secure ? ['--port', '0', '--tls-port', port, '--tls-auth-clients', 'no', ...identity] : ['--port', port]
    return {
      argv: [path, '--bind', '127.0.0.1', '--dir', dir, '--save', '', '--appendonly', 'no', ...copying, ...listen, ...args],
      env,
      // The log as well: the answer alone could come from somebody else's server on this port.
      ready: async (log) => /ready to accept connections/i.test(log) && answersPing(port, files.ca),
      properties: { url: `${secure ? 'rediss' : 'redis'}://127.0.0.1:${port}`, ...(secure && { caPath: files.ca }) },
    }
  })
}

/** Starts three independent Redis; `url` has all their URLs, separated by commas. */
export async function startRedisQuorum({ args = [] } = {}) {
  const started = await Promise.allSettled([1, 2, 3].map(() => startRedis({ args })))
  const nodes = started.flatMap((result) => (result.status === 'fulfilled' ? [result.value] : []))
  const stop = async () => void (await Promise.all(nodes.map((node) => node.stop())))
  const failure = started.find((result) => result.status === 'rejected')
  if (failure) {
    await stop()
    throw failure.reason
  }
  return { url: nodes.map((node) => node.url).join(','), nodes, stop }
}

/**
 * Starts a standalone mongod, or with `replicaSet` the only member, and by then primary, of the set `rs0`. With
 * `initiate: false` it waits for somebody else to make it a member.
 */
export async function startMongod({ replicaSet = false, initiate = replicaSet, args = [] } = {}) {
  const { path, env } = await locateMongod()
  const driver = initiate && (await importDriver())
  return startServer((dir, port) => {
    const quick = ['ttlMonitorSleepSecs=1', 'shutdownTimeoutMillisForSignaledShutdown=100']
    const member = replicaSet ? ['--replSet', 'rs0', '--oplogSize', '128'] : []
    // A socket file would lie outside of the folder, where nothing removes it after a kill.
    const fixed = ['--bind_ip', '127.0.0.1', '--nounixsocket', '--dbpath', dir, '--wiredTigerCacheSizeGB', '0.25']
    return {
      argv: [path, '--port', port, ...fixed, ...quick.flatMap((parameter) => ['--setParameter', parameter]), ...member, ...args],
      env,
      ready: async (log) => /waiting for connections/i.test(log) && (!initiate || isPrimary(driver, port)),
      properties: { url: `mongodb://127.0.0.1:${port}/holdfast${replicaSet ? '?replicaSet=rs0' : ''}` },
    }
  })
}

/** The servers that the tests share, by the variable with their URL. */
export const SHARED_SERVERS = {
  HOLDFAST_TEST_REDIS_URL: () => startRedis(),
  HOLDFAST_TEST_REDIS_CLUSTER_URL: () => startRedisCluster(),
  HOLDFAST_TEST_REDIS_SENTINEL_URL: () => startRedisSentinel(),
  HOLDFAST_TEST_REDIS_QUORUM_URLS: () => startRedisQuorum(),
  HOLDFAST_TEST_MONGODB_URL: () => startMongod(),
  HOLDFAST_TEST_MONGODB_RS_URL: () => startMongod({ replicaSet: true }),
}

/** All of them, each taken from the environment where it is set. */
export async function testServers() {
  const started = []
  const stop = async () => void (await Promise.all(started.map((server) => server.stop())))
  const results = await Promise.allSettled(
    Object.entries(SHARED_SERVERS).map(async ([variable, start]) => {
      if (process.env[variable]) return [variable, process.env[variable]]
      const server = await start()
      started.push(server)
      return [variable, server.url]
    }),
  )
  const failure = results.find((result) => result.status === 'rejected')
  if (failure) {
    await stop()
    throw failure.reason
  }
  return { env: Object.fromEntries(results.map((result) => result.value)), stop }
}

const running = new Set()

process.on('exit', () => {
  for (const server of running) server.killNow()
})

/** Starts what `plan` says, in a folder and on a port of its own. */
export async function startServer(plan) {
  for (let attempt = 1; ; attempt++) {
    const dir = await mkdtemp(join(process.env.HOLDFAST_SERVERS_DIR || tmpdir(), 'holdfast-'))
    const port = await freePort()
    const server = new Server(dir, port)
    try {
      return await server.start(await plan(dir, String(port)))
    } catch (error) {
      await server.stop()
      // Somebody may take the port between the look and the start.
      if (attempt === 5 || !/address already in use/i.test(error.message)) throw error
    }
  }
}

// An exit hook does not run when a signal, a segfault or kill -9 ends this process; the end of this pipe reaches the guard
// all the same. It also spares us signal handlers, which would change how a process under test takes its signals.
const GUARD = 'read -r _; read -r pid <"$0/pid" && kill -9 "$pid"; rm -rf "$0" || { sleep 1; rm -rf "$0"; }'
const REMOVAL = { recursive: true, force: true, maxRetries: 20, retryDelay: 50 }

class Server {
  #dir
  #plan
  #guard
  #child
  #exited
  #isStopped = false

  constructor(dir, port) {
    this.#dir = dir
    this.port = port
    this.#guard = spawn('sh', ['-c', GUARD, dir], { stdio: ['pipe', 'ignore', 'ignore'], detached: true })
    this.#guard.unref()
    this.#guard.stdin.unref()
    running.add(this)
  }

  get process() {
    return this.#child
  }

  get pid() {
    return this.#child.pid
  }

  get #isUp() {
    return this.#child !== undefined && this.#child.exitCode === null && this.#child.signalCode === null
  }

  async start(plan) {
    this.#plan = plan
    Object.assign(this, plan.properties)
    await this.#launch()
    return this
  }

  /** Ends the server for good and removes its folder. */
  async stop() {
    this.#isStopped = true
    await this.#end('SIGKILL')
    await rm(this.#dir, REMOVAL)
    this.#guard.kill('SIGKILL')
    running.delete(this)
  }

  /** A crash. The folder stays: `restart()` finds what had reached the disk. */
  async kill() {
    await this.#end('SIGKILL')
  }

  async pause() {
    if (!this.#isUp) return
    this.#child.kill('SIGSTOP')
    // On a busy machine a thread of the server may run on for a while after the signal was sent.
    while (this.#isUp && !(await isStopped(this.pid))) await sleep(1)
  }

  resume() {
    if (this.#isUp) this.#child.kill('SIGCONT')
  }

  /** Shuts down in good order, unless it is down already, and starts on the same port and folder. */
  async restart() {
    if (this.#isStopped) throw new Error('this server was stopped for good: start another')
    await this.#end('SIGTERM')
    await this.#launch()
  }

  /** What is left to do in an exit hook, where nothing can be waited for. */
  killNow() {
    try {
      if (this.#isUp) this.#child.kill('SIGKILL')
      rmSync(this.#dir, REMOVAL)
    } catch {
      // The guard tries once more; thrown here, it would only hide why the process ends.
    }
  }

  async #launch() {
    const [path, ...args] = this.#plan.argv
    const [logFile, pidFile] = [join(this.#dir, 'log'), join(this.#dir, 'pid')]
    const log = openSync(logFile, 'w')
    const env = { ...process.env, ...this.#plan.env }
    // A session of its own, or a Ctrl-C in the terminal would take the server away under the tests' feet.
    const child = spawn(path, args, { cwd: this.#dir, stdio: ['ignore', log, log], env, detached: true })
    closeSync(log)
    child.unref()
    this.#child = child
    this.#exited = new Promise((resolve) => child.once('exit', resolve).once('error', resolve))
    this.#exited.then(() => rmSync(pidFile, { force: true }))
    writeFileSync(pidFile, `${child.pid}\n`)

    const deadline = Date.now() + START_TIMEOUT_MS
    const readLog = () => readFileSync(logFile, 'utf8')
    while (!(await this.#plan.ready(readLog()))) {
      const trouble = !this.#isUp ? 'ended while starting' : Date.now() > deadline && 'does not become ready'
      if (trouble) throw new Error(`${basename(path)} ${trouble}. From its log:\n${errorLines(readLog())}`)
      await sleep(20)
    }
  }

  async #end(signal) {
    if (!this.#isUp) return
    const child = this.#child
    child.ref()
    child.kill(signal)
    // A paused server would sleep through a request to shut down.
    child.kill('SIGCONT')
    const killTimer = setTimeout(() => child.kill('SIGKILL'), 10_000)
    await this.#exited
    clearTimeout(killTimer)
  }
}

// Only Linux tells of every thread; elsewhere the signal has to do.
async function isStopped(pid) {
  const threads = await readdir(`/proc/${pid}/task`).catch(() => [])
  const stats = await Promise.all(threads.map((thread) => readFile(`/proc/${pid}/task/${thread}/stat`, 'utf8').catch(() => ') T')))
  return stats.every((stat) => /.*\) T/s.test(stat))
}

// mongod buries what went wrong under a page about shutting down in good order.
function errorLines(log) {
  const lines = log.trim().split('\n')
  const errors = lines.filter((line) => /"s":"[EF]"/.test(line))
  return (errors.length > 0 ? errors : lines).slice(-10).join('\n')
}

// Below the range that systems hand out for outgoing connections: a client that keeps reconnecting to a stopped server
// within that range ends up connected to itself, and the restarted server finds its port taken.
export async function freePort() {
  for (;;) {
    const port = 15_000 + Math.floor(Math.random() * 15_000)
    const probe = net.createServer()
    const isFree = await new Promise((resolve) => {
      probe.once('error', () => resolve(false)).listen(port, '127.0.0.1', () => resolve(true))
    })
    await new Promise((resolve) => probe.close(resolve))
    if (isFree) return port
  }
}

function answersPing(port, caPath) {
  return new Promise((resolve) => {
    const at = { host: '127.0.0.1', port }
    const socket = caPath ? tls.connect({ ...at, ca: readFileSync(caPath) }) : net.connect(at)
    const settle = (answer) => (socket.destroy(), resolve(answer))
    socket.setTimeout(1000, () => settle(false))
    socket.once('error', () => settle(false)).once('close', () => settle(false))
    // A server with a password refuses the PING, and is no less up.
    socket.once('data', (data) => settle(/^(\+PONG|-NOAUTH)/.test(data.toString())))
    socket.write('PING\r\n')
  })
}

// Needed for replica sets alone, so that nobody else has to have it installed.
export const importDriver = () =>
  import('mongodb').catch((cause) => {
    throw new Error('a replica set is set up through the npm package mongodb: run npm install.', { cause })
  })

// Asks to become a set each time: one that is a set already answers with an error, of no interest here.
async function isPrimary({ MongoClient }, port) {
  const client = new MongoClient(`mongodb://127.0.0.1:${port}/?directConnection=true`, { serverSelectionTimeoutMS: 2000 })
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
  process.exitCode = await main(process.argv.slice(2), testServers)
}
