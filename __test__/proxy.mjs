// A bad network on demand: a TCP proxy in front of a real server, and the setting that the tests with it share.
import assert from 'node:assert/strict'
import net from 'node:net'
import { after, before, describe, it } from 'node:test'
import { startMongod, startRedis } from '../scripts/servers.mjs'
import { LockService } from '../index.js'
import { random } from './stores.mjs'
import { until } from './tools.mjs'

/** One client's connection through the proxy. What is held back keeps its order, as on a real wire. */
class Pair {
  #held = { toServer: [], toClient: [] }
  #waits = { toServer: Promise.resolve(), toClient: Promise.resolve() }
  isLosing = false
  isStranded = false

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
      proxy.saw(this, data)
      this.#pass('toServer', data)
    })
    this.server.on('data', (data) => {
      if (proxy.answered(this)) return
      this.#pass('toClient', data)
    })
  }

  #pass(direction, data) {
    if (this.isStranded) return
    const { holds, lagMs } = this.proxy
    if (holds[direction] || this.#held[direction].length > 0) this.#held[direction].push(data)
    else if (lagMs === 0) this.#write(direction, data)
    else {
      const sent = new Promise((resolve) => setTimeout(resolve, lagMs))
      this.#waits[direction] = Promise.all([this.#waits[direction], sent]).then(() => this.#write(direction, data))
    }
  }

  #write(direction, data) {
    const socket = direction === 'toServer' ? this.server : this.client
    if (!socket.destroyed) socket.write(data)
  }

  resume() {
    for (const direction of ['toServer', 'toClient']) {
      for (const data of this.#held[direction].splice(0)) this.#write(direction, data)
    }
  }

  cut() {
    if (!this.proxy.pairs.delete(this)) return
    for (const socket of [this.client, this.server]) {
      // A socket that is about to end takes no reset: Node 20 would then wait for its handle for ever at exit.
      if (socket.writableEnded) socket.destroy()
      else socket.resetAndDestroy()
    }
  }
}

class Proxy {
  pairs = new Set()
  holds = { toServer: false, toClient: false }
  lagMs = 0
  #traps = []
  #target
  #listener

  constructor(target) {
    this.#target = target
  }

  /** Listens, on the same port each time. */
  async up() {
    // Below the range of outgoing connections: a client that connects again and again to a port in that range, while
    // nobody listens there, meets itself in the end.
    for (let tries = 0; ; tries++) {
      const port = this.port ?? 15_000 + Math.floor(Math.random() * 15_000)
      const listener = net.createServer((client) => this.pairs.add(new Pair(this, client, this.#target)))
      const error = await new Promise((resolve) => listener.once('error', resolve).listen(port, '127.0.0.1', resolve))
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

  /** Every connection breaks. */
  cut() {
    for (const pair of this.pairs) pair.cut()
  }

  /** Nothing is to be reached: connections break, and new ones are refused. */
  async down() {
    const closed = new Promise((resolve) => this.#listener.close(resolve))
    this.cut()
    await closed
  }

  /** Answers are held back, requests are not; both with `freeze`. */
  hold() {
    this.holds.toClient = true
  }

  freeze() {
    this.holds = { toServer: true, toClient: true }
  }

  /** The connections that there are stay open, and carry nothing any more; new ones are as good as ever. */
  strand() {
    for (const pair of this.pairs) pair.isStranded = true
  }

  /** Whatever was held back arrives now. */
  resume() {
    this.holds = { toServer: false, toClient: false }
    for (const pair of this.pairs) pair.resume()
  }

  /**
   * The answer to the next request with `text` in it (after `skip` others) gets lost, and whatever comes after it on that
   * connection: a wire does not lose parts of what it carries. Resolves to `true` when the server has answered, so that
   * it has done the work.
   */
  loseReply(text, skip = 0) {
    return new Promise((resolve) => this.#traps.push({ text, skip, resolve: () => resolve(true) }))
  }

  /** No further answer gets lost. */
  disarm() {
    this.#traps.length = 0
  }

  saw(pair, data) {
    const index = this.#traps.findIndex(({ text }) => data.includes(text))
    if (index >= 0 && this.#traps[index].skip-- === 0) pair.isLosing = this.#traps.splice(index, 1)[0].resolve
  }

  answered(pair) {
    if (!pair.isLosing) return false
    pair.isLosing()
    return true
  }

  async close() {
    await this.down()
  }
}

export async function startProxy(port) {
  const proxy = new Proxy(port)
  await proxy.up()
  return proxy
}

const mongodbUrl = (port) => `mongodb://127.0.0.1:${port}/holdfast?directConnection=true`

/** The servers that a proxy can stand in front of. */
export const SERVERS = {
  redis: { engine: 'redis', start: startRedis, url: (port) => `redis://127.0.0.1:${port}` },
  mongodb: { engine: 'mongodb', start: startMongod, url: mongodbUrl },
  'mongodb-replica-set': { engine: 'mongodb', start: (how) => startMongod({ replicaSet: true, ...how }), url: mongodbUrl },
}

/** Longest that a call may take to come back where a store's time-out ends it: the rest is for a slow machine. */
export const SLACK_MS = 1000

/** A service behind a proxy, one that reaches the store directly, and both their ends. */
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

  // These are properties, so that a test can take out what it needs and pass the rest on.
  connect = async (options, port = this.proxy.port) => {
    const service = await LockService.connect(SERVERS[this.kind].url(port), { ...this.options, ...options })
    this.#services.push(service)
    return service
  }

  /** What a name is called in the store, which no other part of a request contains. */
  key = (name) => `${this.options.keyPrefix}${name}`

  /** A service behind the proxy that has done everything once, so that nothing is left to be set up (scripts, pools). */
  warm = async (options) => {
    const locks = await this.connect({ storeTimeoutMs: 4000, ...options })
    const lock = await locks.acquire(['warm', 'up'])
    await lock.extend(40_000)
    await lock.release()
    await locks.acquireLock('warm')
    await locks.releaseLock('warm')
    return locks
  }

  /** Closes every service but `keep`, which ends whatever they may still have on its way. */
  async closeServices(keep) {
    await Promise.all(this.#services.filter((service) => service !== keep).map((service) => service.close()))
  }

  async close() {
    if (this.proxy) await this.proxy.close()
    await this.closeServices()
  }
}

/**
 * A group of tests with a server of its own, or one for each test with `serverPerTest`, started with `args`. A test gets
 * `(scene, t)`, and must leave nothing in the store.
 */
export function proxySuite(kind, title, { serverPerTest = false, args }, define) {
  describe(`${kind}: ${title}`, { concurrency: serverPerTest ? 2 : 4 }, () => {
    let shared
    const start = () => SERVERS[kind].start({ args }).catch((error) => ({ trouble: error.message }))
    if (!serverPerTest) {
      before(async () => void (shared = await start()))
      after(() => shared.stop?.())
    }
    define((name, body) =>
      it(name, { timeout: 90_000 }, async (t) => {
        const server = shared ?? (await start())
        if (server.trouble) {
          assert.ok(!process.env.CI, server.trouble)
          return t.skip(`no ${kind}: ${server.trouble}`)
        }
        const fixture = new ProxyFixture(kind, server)
        try {
          await fixture.open()
          await body(fixture, t)
          await fixture.closeServices(fixture.direct)
          // A name that was handed to a waiter of a service that is gone is kept for it for 2 s.
          const kept = async () => (await fixture.direct.list()).some(({ fencingToken }) => fencingToken === null)
          await until('nothing is kept for a waiter', async () => !(await kept()))
          assert.deepEqual(await fixture.direct.list(), [], 'the test left locks behind')
        } finally {
          await fixture.close()
          if (serverPerTest) await server.stop()
        }
      }),
    )
  })
}
