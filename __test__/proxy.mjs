// A faulty network on demand: a TCP proxy in front of a real server, and the fixture of the tests that use it.
import assert from 'node:assert/strict'
import { mkdtemp, readdir, readFile, readlink, rm } from 'node:fs/promises'
import net from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import tls from 'node:tls'
import { certify, makeAuthority } from '../scripts/certificates.mjs'
import { startEtcd } from '../scripts/etcd.mjs'
import { startMariadb } from '../scripts/mysql.mjs'
import { startPostgres } from '../scripts/postgres.mjs'
import { freePort, startMongod, startRedis } from '../scripts/servers.mjs'
import { startZookeeper } from '../scripts/zookeeper.mjs'
import { LockService } from '../index.js'
import { directUrl } from './mongodb-client.mjs'
import { random, skip } from './stores.mjs'
import { prepared, until } from './tools.mjs'
import { folderOf } from './zookeeper-client.mjs'

/** The types of the frames of HTTP/2 with a reply are up to this one: data and headers. */
const HEADERS = 1

/** Returns the frames of HTTP/2 in a part of a stream that begins with one (RFC 9113, chapter 4.1). @param {Buffer} data */
function frames(data) {
  const found = []
  for (let at = 0; at + 9 <= data.length;) {
    const end = at + 9 + data.readUIntBE(at, 3)
    found.push({ type: data[at + 3], stream: data.readUInt32BE(at + 5) & 0x7fffffff, body: data.subarray(at + 9, end) })
    at = end
  }
  return found
}

/** One client's connection through the proxy. Held data keeps its order, as on a real network. */
class ProxiedConnection {
  /** @type {{ toServer: Buffer[], toClient: Buffer[] }} */
  #pending = { toServer: [], toClient: [] }
  #delayed = { toServer: Promise.resolve(), toClient: Promise.resolve() }
  /** @type {((reply: Buffer) => void) | undefined} Called with the next replies, which are dropped. */
  onDroppedReply
  isBlackholed = false

  /** @param {Proxy} proxy @param {net.Socket} client @param {number} port */
  constructor(proxy, client, port) {
    this.proxy = proxy
    this.client = client
    this.server = net.connect(port, '127.0.0.1')
    for (const socket of [client, this.server]) {
      socket.setNoDelay(true)
      socket.on('error', () => {})
      socket.on('close', () => proxy.isSilent || this.cut())
    }
    client.on('data', (data) => {
      if (proxy.intercept?.(data, this)) return
      proxy.onRequest(this, data)
      this.#pass('toServer', data)
    })
    this.server.on('data', (data) => {
      proxy.changeReply?.(data)
      if (this.onDroppedReply) this.onDroppedReply(data)
      else this.#pass('toClient', data)
    })
  }

  /** @param {'toServer' | 'toClient'} direction @param {Buffer} data */
  #pass(direction, data) {
    if (this.isBlackholed) return
    const { holds, delayMs } = this.proxy
    if (holds[direction] || this.#pending[direction].length > 0) this.#pending[direction].push(data)
    else if (delayMs === 0) this.#write(direction, data)
    else {
      const waited = new Promise((resolve) => setTimeout(resolve, delayMs))
      this.#delayed[direction] = Promise.all([this.#delayed[direction], waited]).then(() =>
        this.#write(direction, data),
      )
    }
  }

  /** @param {'toServer' | 'toClient'} direction @param {Buffer} data */
  #write(direction, data) {
    const socket = direction === 'toServer' ? this.server : this.client
    if (!socket.destroyed) socket.write(data)
  }

  /** Sends the held data. */
  resume() {
    for (const direction of /** @type {const} */ (['toServer', 'toClient'])) {
      for (const data of this.#pending[direction].splice(0)) this.#write(direction, data)
    }
  }

  /** Resets both ends. */
  cut() {
    if (!this.proxy.connections.delete(this)) return
    for (const socket of [this.client, this.server]) {
      // No reset for a socket that is about to end: Node 20 would wait for its handle at exit for ever.
      if (socket.writableEnded || socket instanceof tls.TLSSocket) socket.destroy()
      else socket.resetAndDestroy()
    }
  }

  /**
   * Sends the first `length` bytes of a request, and pauses the client. Returns a function that sends the rest.
   *
   * For `intercept`.
   *
   * @param {Buffer} data
   * @param {number} length
   */
  split(data, length) {
    this.server.write(data.subarray(0, length))
    this.client.pause()
    return () => {
      this.server.write(data.subarray(length))
      this.client.resume()
    }
  }
}

/** @typedef {(data: Buffer, connection: ProxiedConnection) => boolean} Intercept Returns whether it forwards a request itself. */

class Proxy {
  /** The port of the proxy, since the first `up()`. */
  port = 0
  /** @type {Set<ProxiedConnection>} */
  connections = new Set()
  holds = { toServer: false, toClient: false }
  /** Whether no side of a connection sees the end of the other one. */
  isSilent = false
  delayMs = 0
  /** Whether new connections are accepted and get no data. Open ones work. */
  hangsNew = false
  /** Whether the protocol is HTTP/2. */
  isHttp2 = false
  /** @type {((reply: Buffer) => void) | undefined} Called with each reply, which it may change in place. */
  changeReply
  /** The port of the server. Open connections keep theirs. */
  target
  /** @type {{ texts: string[], skip: number, resolve: () => void }[]} */
  #traps = []
  /** The clients' sockets, with those in the middle of a TLS handshake. @type {Set<net.Socket>} */
  #sockets = new Set()
  #files
  /** @type {net.Server | undefined} */
  #listener

  /** @param {number} target @param {Intercept | undefined} intercept @param {Awaited<typeof serverFiles> | undefined} files */
  constructor(target, intercept, files) {
    this.target = target
    this.intercept = intercept
    this.#files = files
  }

  /** Listens, on the same port each time. */
  async up() {
    for (let tries = 0; ; tries++) {
      const port = this.port || (await freePort())
      const accept = (/** @type {net.Socket} */ client) => {
        const connection = new ProxiedConnection(this, client, this.target)
        connection.isBlackholed = this.hangsNew
        this.connections.add(connection)
      }
      const listener = this.#files ? tls.createServer(this.#files, accept) : net.createServer(accept)
      listener.on('connection', (/** @type {net.Socket} */ socket) => {
        this.#sockets.add(socket)
        socket.once('close', () => this.#sockets.delete(socket))
      })
      const error = await new Promise((resolve) =>
        listener.once('error', resolve).listen(port, '127.0.0.1', () => resolve(undefined)),
      )
      if (error) {
        if (tries > 20) throw error
        await new Promise((resolve) => setTimeout(resolve, 50))
        continue
      }
      this.#listener = listener
      this.port = port
      return
    }
  }

  /** Breaks every connection. */
  cut() {
    for (const connection of this.connections) connection.cut()
  }

  /** Breaks every connection and refuses new ones, until `up()`. */
  async down() {
    const closed = new Promise((resolve) => this.#listener?.close(resolve))
    this.cut()
    for (const socket of this.#sockets) socket.destroy()
    await closed
  }

  /** Holds replies, but not requests, until `resume()`. */
  holdReplies() {
    this.holds.toClient = true
  }

  /** Holds requests and replies, until `resume()`. */
  freeze() {
    this.holds = { toServer: true, toClient: true }
  }

  /** Drops all data of the open connections, which stay open. New connections work. */
  blackhole() {
    for (const connection of this.connections) connection.isBlackholed = true
  }

  /** Holds everything, also the ends of connections, until `resume()`, which breaks them. */
  silence() {
    this.freeze()
    this.isSilent = true
  }

  /** Sends the held data, and holds nothing any more. */
  resume() {
    if (this.isSilent) this.cut()
    this.isSilent = false
    this.holds = { toServer: false, toClient: false }
    for (const connection of this.connections) connection.resume()
  }

  /**
   * Drops the reply to the next request that contains `text` (after `skip` others), and everything after it on that connection:
   * a TCP connection does not lose single parts. Resolves to `true` when the server has replied, so that it has executed the request.
   *
   * @param {string | string[]} text One text, or several of which one is enough.
   * @returns {Promise<true>}
   */
  dropReply(text, skip = 0) {
    const texts = [text].flat()
    return new Promise((resolve) => this.#traps.push({ texts, skip, resolve: () => resolve(true) }))
  }

  /** Drops no further replies. */
  stopDroppingReplies() {
    this.#traps.length = 0
  }

  /**
   * Called with each request before it is forwarded.
   *
   * @param {ProxiedConnection} connection
   * @param {Buffer} data
   */
  onRequest(connection, data) {
    const index = this.#traps.findIndex(({ texts }) => texts.some((text) => data.includes(text)))
    if (index < 0 || this.#traps[index].skip-- > 0) return
    const [{ texts, resolve }] = this.#traps.splice(index, 1)
    // PostgreSQL replies to each statement of a request. The last one of a transaction commits it.
    const last = data.includes('COMMIT\0') ? 'COMMIT\0' : ''
    // etcd also acknowledges what it has received, before it executes a request.
    const asked = this.isHttp2 && frames(data).find(({ body }) => texts.some((text) => body.includes(text)))
    connection.onDroppedReply = (reply) => {
      const isReply = asked
        ? frames(reply).some(({ type, stream }) => type <= HEADERS && stream === asked.stream)
        : reply.includes(last)
      if (isReply) resolve()
    }
  }

  async close() {
    await this.down()
  }
}

/**
 * Starts a proxy in front of a port of this machine. With `secure`, the clients of the proxy use TLS, and the server does not.
 *
 * @param {number} port
 * @param {{ intercept?: Intercept, secure?: boolean }} [options]
 */
export async function startProxy(port, { intercept, secure = false } = {}) {
  const proxy = new Proxy(port, intercept, secure ? await (serverFiles ??= makeServerFiles()) : undefined)
  await proxy.up()
  return proxy
}

/** @type {ReturnType<typeof makeServerFiles> | undefined} */
let serverFiles

/** Creates the certificate and the key of a server. */
async function makeServerFiles() {
  const dir = await mkdtemp(join(tmpdir(), 'holdfast-proxy-'))
  await makeAuthority(dir)
  const { cert, key } = await certify(dir, 'server')
  const files = { cert: await readFile(cert), key: await readFile(key) }
  await rm(dir, { recursive: true })
  return files
}

/**
 * Returns whether a process has the other end of a connection. Only Linux shows that.
 *
 * @param {number | undefined} pid @param {net.Socket} connection
 */
export async function owns(pid, { remotePort = 0, localPort = 0 }) {
  const hex = (/** @type {number} */ port) => `:${port.toString(16).toUpperCase().padStart(4, '0')}`
  const lines = (await readFile('/proc/net/tcp', 'utf8')).split('\n').map((line) => line.trim().split(/\s+/))
  const isIt = (/** @type {string[]} */ [, local, remote]) =>
    local?.endsWith(hex(remotePort)) && remote?.endsWith(hex(localPort))
  // A connection that has ended has the inode 0.
  const inodes = lines.filter((fields) => isIt(fields) && fields[9] !== '0').map((fields) => `socket:[${fields[9]}]`)
  const links = (await readdir(`/proc/${pid}/fd`)).map((fd) => readlink(`/proc/${pid}/fd/${fd}`).catch(() => ''))
  return (await Promise.all(links)).some((link) => inodes.includes(link))
}

/** @param {number} port */
const redisUrl = (port) => `redis://127.0.0.1:${port}`

/**
 * The servers that can be tested behind a proxy: how to start them, and their URLs, behind the proxy (with the options for such
 * a connection) and without it. `commit`: the first request for several names grants none,
 * and the last one contains this.
 */
export const SERVERS = {
  redis: { engine: 'redis', start: startRedis, url: redisUrl },
  'redis-tls': {
    engine: 'redis',
    start: startRedis,
    url: (/** @type {number} */ port) => `rediss://127.0.0.1:${port}`,
    options: { tls: { insecure: true } },
    directUrl: redisUrl,
  },
  mongodb: { engine: 'mongodb', start: startMongod, url: directUrl },
  'mongodb-replica-set': {
    engine: 'mongodb',
    start: (/** @type {{ args?: string[] }} */ how) => startMongod({ replicaSet: true, ...how }),
    url: directUrl,
  },
  postgres: {
    engine: 'postgres',
    start: () => startPostgres(),
    // Several names are a transaction: its first packet locks rows, and the second one grants them.
    commit: 'COMMIT\0',
    url: (/** @type {number} */ port) => `postgres://holdfast@127.0.0.1:${port}/postgres`,
  },
  mysql: {
    engine: 'mysql',
    start: () => startMariadb(),
    commit: 'COMMIT;',
    // A prepared statement contains the names as bytes, another one as hexadecimal digits.
    encoded: (/** @type {string} */ key) => [key, Buffer.from(key).toString('hex')],
    url: (/** @type {number} */ port) => `mysql://holdfast@127.0.0.1:${port}/holdfast`,
  },
  etcd: {
    engine: 'etcd',
    start: startEtcd,
    encoded: (/** @type {string} */ key) => `${key}/`,
    url: (/** @type {number} */ port) => `etcd://127.0.0.1:${port}`,
  },
  zookeeper: {
    engine: 'zookeeper',
    // Leases outlast outages in these tests, so that sessions are long.
    start: () =>
      startZookeeper({
        settings: { maxSessionTimeout: 300_000 },
        options: ['-Dznode.container.checkIntervalMs=120000'],
      }),
    // The first attempt for a new name creates its folder: that request grants nothing.
    prepare: async (/** @type {LockService} */ direct) =>
      void (await (await direct.acquire(['name', 'name:2'])).release()),
    service: { sessionTimeoutMs: 300_000 },
    encoded: (/** @type {string} */ key) => folderOf(key),
    url: (/** @type {number} */ port) => `zookeeper://127.0.0.1:${port}`,
  },
}

export const SERVER_KINDS = /** @type {(keyof typeof SERVERS)[]} */ (Object.keys(SERVERS))

/** How much longer than its limit a call may take: for a machine that stands still for a second or two. */
export const SLACK_MS = 2500

/**
 * A server, a proxy, services behind the proxy, and the service `direct` that bypasses it.
 *
 * @typedef {keyof typeof SERVERS} Kind
 * @typedef {Awaited<ReturnType<typeof startRedis>>} Server
 */
class ProxyFixture {
  #services

  /** @param {{ kind: Kind, server: Server, proxy: Proxy, direct: LockService, options: { keyPrefix: string } }} parts */
  constructor({ kind, server, proxy, direct, options }) {
    this.kind = kind
    this.server = server
    this.proxy = proxy
    this.direct = direct
    this.options = options
    this.#services = [direct]
  }

  /** @param {Kind} kind @param {Server} server */
  static async open(kind, server) {
    const { url, directUrl = url, options: secure, service, prepare } = /** @type {any} */ (SERVERS[kind])
    const options = { keyPrefix: `${random()}:`, ...service }
    const direct = await LockService.connect(directUrl(server.port), { connectMs: 20_000, ...options })
    const proxy = await startProxy(server.port, { secure: secure !== undefined })
    proxy.isHttp2 = SERVERS[kind].engine === 'etcd'
    await prepare?.(direct)
    return new ProxyFixture({ kind, server, proxy, direct, options })
  }

  // These are properties, so that tests can destructure them.
  /** @param {import('../index.js').ConnectOptions} [options] */
  connect = async (options, port = this.proxy.port) => {
    const { url, options: secure } = SERVERS[this.kind]
    // A short timeout is one for calls: on a busy machine a connection takes longer to open.
    const repeated = options?.lazy ? {} : { connectMs: 20_000 }
    const service = await LockService.connect(url(port), { ...repeated, ...this.options, ...secure, ...options })
    this.#services.push(service)
    return service
  }

  /**
   * Returns the key of a name in the requests of this store. No other part of a request contains it.
   *
   * @param {string} name
   */
  key = (name) => {
    const key = `${this.options.keyPrefix}${name}`
    const { encoded } = /** @type {{ encoded?: (key: string) => any }} */ (SERVERS[this.kind])
    return encoded ? encoded(key) : key
  }

  /**
   * Connects a service through the proxy, and makes each kind of call once, so that scripts and pools are set up.
   *
   * @param {import('../index.js').ConnectOptions} [options]
   */
  warm = async (options) => {
    const locks = await this.connect({ storeTimeoutMs: 4000, ...options })
    // With the ttl of the tests: etcd has a lease for each class of ttls, and one for waiters.
    await prepared(() => locks.using('warm', { ttlMs: 60_000 }, () => {}))
    await prepared(() => locks.using(['warm', 'up'], { ttlMs: 60_000 }, (lock) => lock.extend(61_000)))
    await prepared(() => locks.acquireLock('warm', 60))
    await prepared(() => locks.releaseLock('warm'))
    return locks
  }

  /**
   * Closes every service but `keep`, which ends their background releases.
   *
   * @param {LockService} [keep]
   */
  async closeServices(keep) {
    await Promise.all(this.#services.filter((service) => service !== keep).map((service) => service.close()))
  }

  async close() {
    await this.proxy.close()
    await this.closeServices()
  }
}

/**
 * Declares a group of tests with a separate server, or with one for each test (`serverPerTest`), started with `args`. A test
 * gets `(fixture, t)`, and must leave nothing in the store.
 *
 * @typedef {(fixture: ProxyFixture, t: import('node:test').TestContext) => unknown} Body
 * @param {Kind} kind
 * @param {string} title
 * @param {{ serverPerTest?: boolean, args?: string[] }} options
 * @param {(test: (name: string, body: Body) => void) => void} define
 */
export function proxySuite(kind, title, { serverPerTest = false, args }, define) {
  describe(`${kind}: ${title}`, { concurrency: serverPerTest ? 2 : 4 }, () => {
    /** @type {Server | Error | undefined} */
    let shared
    const start = () => SERVERS[kind].start({ args }).catch((/** @type {Error} */ error) => error)
    if (!serverPerTest) {
      before(async () => void (shared = await start()))
      after(() => (shared instanceof Error ? undefined : shared?.stop()))
    }
    define((name, body) =>
      it(name, { timeout: 90_000 }, async (t) => {
        const server = shared ?? (await start())
        if (server instanceof Error) return skip(t, `no ${kind}: ${server.message}`)
        const fixture = await ProxyFixture.open(kind, server)
        try {
          await body(fixture, t)
          await fixture.closeServices(fixture.direct)
          // A name that was reserved for a waiter of a closed service stays reserved for some seconds.
          const isReserved = async () => (await fixture.direct.list()).some(({ fencingToken }) => fencingToken === null)
          await until('no name is reserved', async () => !(await isReserved()))
          assert.deepEqual(await fixture.direct.list(), [], 'the test left locks behind')
        } finally {
          await fixture.close()
          if (serverPerTest) await server.stop()
        }
      }))
  })
}
