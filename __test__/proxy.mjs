// A faulty network on demand: a TCP proxy in front of a real server, and the fixture of the tests that use it.
import assert from 'node:assert/strict'
import net from 'node:net'
import { after, before, describe, it } from 'node:test'
import { startMongod, startRedis } from '../scripts/servers.mjs'
import { LockService } from '../index.js'
import { random, skip } from './stores.mjs'
import { until } from './tools.mjs'

/** One client's connection through the proxy. Held data keeps its order, as on a real network. */
class ProxiedConnection {
  #pending = { toServer: [], toClient: [] }
  #delayed = { toServer: Promise.resolve(), toClient: Promise.resolve() }
  /** Called with the next reply, which is dropped together with all later ones. */
  onDroppedReply
  isBlackholed = false

  constructor(proxy, client, port) {
    this.proxy = proxy
    this.client = client
    this.server = net.connect(port, '127.0.0.1')
    for (const socket of [client, this.server]) {
      socket.setNoDelay(true)
      socket.on('error', () => {})
      socket.on('close', () => this.cut())
    }
    client.on('data', (data) => {
      if (proxy.intercept?.(data, this)) return
      proxy.onRequest(this, data)
      this.#pass('toServer', data)
    })
    this.server.on('data', (data) => {
      if (this.onDroppedReply) this.onDroppedReply()
      else this.#pass('toClient', data)
    })
  }

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

  #write(direction, data) {
    const socket = direction === 'toServer' ? this.server : this.client
    if (!socket.destroyed) socket.write(data)
  }

  /** Sends the held data. */
  resume() {
    for (const direction of ['toServer', 'toClient']) {
      for (const data of this.#pending[direction].splice(0)) this.#write(direction, data)
    }
  }

  /** Resets both ends. */
  cut() {
    if (!this.proxy.connections.delete(this)) return
    for (const socket of [this.client, this.server]) {
      // No reset for a socket that is about to end: Node 20 would wait for its handle at exit for ever.
      if (socket.writableEnded) socket.destroy()
      else socket.resetAndDestroy()
    }
  }

  /**
   * Sends the first `length` bytes of a request, and pauses the client. Returns a function that sends the rest.
   *
   * For `intercept`.
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

class Proxy {
  connections = new Set()
  holds = { toServer: false, toClient: false }
  delayMs = 0
  /** `(data, connection)`: returns whether it forwards a request itself. */
  intercept
  #traps = []
  #target
  #listener

  constructor(target, intercept) {
    this.#target = target
    this.intercept = intercept
  }

  /** Listens, on the same port each time. */
  async up() {
    // Below the ephemeral ports: a client that keeps connecting to a closed ephemeral port connects to itself in the end.
    for (let tries = 0; ; tries++) {
      const port = this.port ?? 15_000 + Math.floor(Math.random() * 15_000)
      const listener = net.createServer((client) =>
        this.connections.add(new ProxiedConnection(this, client, this.#target)),
      )
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
    const closed = new Promise((resolve) => this.#listener.close(resolve))
    this.cut()
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

  /** Sends the held data, and holds nothing any more. */
  resume() {
    this.holds = { toServer: false, toClient: false }
    for (const connection of this.connections) connection.resume()
  }

  /**
   * Drops the reply to the next request that contains `text` (after `skip` others), and everything after it on that connection:
   * a TCP connection does not lose single parts. Resolves to `true` when the server has replied, so that it has executed the request.
   */
  dropReply(text, skip = 0) {
    return new Promise((resolve) => this.#traps.push({ text, skip, resolve: () => resolve(true) }))
  }

  /** Drops no further replies. */
  stopDroppingReplies() {
    this.#traps.length = 0
  }

  /** Called with each request before it is forwarded. */
  onRequest(connection, data) {
    const index = this.#traps.findIndex(({ text }) => data.includes(text))
    if (index >= 0 && this.#traps[index].skip-- === 0)
      connection.onDroppedReply = this.#traps.splice(index, 1)[0].resolve
  }

  async close() {
    await this.down()
  }
}

/** Starts a proxy in front of a port of this machine. */
export async function startProxy(port, { intercept = undefined } = {}) {
  const proxy = new Proxy(port, intercept)
  await proxy.up()
  return proxy
}

const mongodbUrl = (port) => `mongodb://127.0.0.1:${port}/holdfast?directConnection=true`

/** The servers that can be tested behind a proxy. */
export const SERVERS = {
  redis: { engine: 'redis', start: startRedis, url: (port) => `redis://127.0.0.1:${port}` },
  mongodb: { engine: 'mongodb', start: startMongod, url: mongodbUrl },
  'mongodb-replica-set': {
    engine: 'mongodb',
    start: (how) => startMongod({ replicaSet: true, ...how }),
    url: mongodbUrl,
  },
}

/** How much longer than its limit a call may take: for a machine that stands still for a second or two. */
export const SLACK_MS = 2500

/** A server, a proxy, services behind the proxy, and the service `direct` that bypasses it. */
class ProxyFixture {
  #services = []

  constructor(kind, server) {
    this.kind = kind
    this.server = server
    this.options = { keyPrefix: `${random()}:` }
  }

  async open() {
    this.proxy = await startProxy(this.server.port)
    this.direct = await this.connect({}, this.server.port)
    return this
  }

  // These are properties, so that tests can destructure them.
  connect = async (options, port = this.proxy.port) => {
    const service = await LockService.connect(SERVERS[this.kind].url(port), { ...this.options, ...options })
    this.#services.push(service)
    return service
  }

  /** Returns the key of a name in the store. No other part of a request contains it. */
  key = (name) => `${this.options.keyPrefix}${name}`

  /** Connects a service through the proxy, and makes each kind of call once, so that scripts and pools are set up. */
  warm = async (options) => {
    const locks = await this.connect({ storeTimeoutMs: 4000, ...options })
    const lock = await locks.acquire(['warm', 'up'])
    await lock.extend(40_000)
    await lock.release()
    await locks.acquireLock('warm')
    await locks.releaseLock('warm')
    return locks
  }

  /** Closes every service but `keep`, which ends their background releases. */
  async closeServices(keep) {
    await Promise.all(this.#services.filter((service) => service !== keep).map((service) => service.close()))
  }

  async close() {
    if (this.proxy) await this.proxy.close()
    await this.closeServices()
  }
}

/**
 * Declares a group of tests with a separate server, or with one for each test (`serverPerTest`), started with `args`. A test
 * gets `(fixture, t)`, and must leave nothing in the store.
 */
export function proxySuite(kind, title, { serverPerTest = false, args }, define) {
  describe(`${kind}: ${title}`, { concurrency: serverPerTest ? 2 : 4 }, () => {
    let shared
    const start = () => SERVERS[kind].start({ args }).catch((error) => ({ startError: error.message }))
    if (!serverPerTest) {
      before(async () => void (shared = await start()))
      after(() => shared.stop?.())
    }
    define((name, body) =>
      it(name, { timeout: 90_000 }, async (t) => {
        const server = shared ?? (await start())
        if (server.startError) return skip(t, `no ${kind}: ${server.startError}`)
        const fixture = new ProxyFixture(kind, server)
        try {
          await fixture.open()
          await body(fixture, t)
          await fixture.closeServices(fixture.direct)
          // A name that was reserved for a waiter of a closed service stays reserved for 2 s.
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
