// ZooKeeper with three servers: a follower that is cut off from its leader, a leader that is killed or stopped, clocks that step.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { LockService } from '../index.js'
import { locateZookeeper, modeOf, startZookeepers } from '../scripts/zookeeper.mjs'
import { startProxy } from './proxy.mjs'
import { canStartServer, random } from './stores.mjs'
import { sleep, until } from './tools.mjs'

/** @typedef {Awaited<ReturnType<typeof startProxy>>} Proxy */

/** Three servers. Each one reaches the others through proxies. */
class Ensemble {
  /** @type {Map<string, Proxy>} */
  links = new Map()
  /** @type {LockService[]} */
  #services = []
  /** @type {Awaited<ReturnType<typeof startZookeepers>>} */
  servers = /** @type {any} */ (undefined)

  async start() {
    this.servers = await startZookeepers({
      address: async (from, to, port) => {
        const proxy = await startProxy(port)
        this.links.set(`${from}>${to}`, proxy)
        return proxy.port
      },
    })
    return this
  }

  /** Resolves to the index of a leader, and those of the followers. */
  async roles() {
    const { members } = this.servers
    return until(
      'the servers have a leader and two followers',
      async () => {
        const modes = await Promise.all(members.map(({ port }) => modeOf(port)))
        const leader = modes.indexOf('leader')
        const followers = modes.flatMap((mode, index) => (mode === 'follower' ? [index] : []))
        return leader >= 0 && followers.length === 2 && { leader, followers }
      },
      60_000,
    )
  }

  /** Connects a service to some of the servers. @param {number[]} indices @param {import('../index.js').ConnectOptions} options */
  async connect(indices, options) {
    const hosts = indices.map((index) => `127.0.0.1:${this.servers.members[index].port}`)
    const service = await LockService.connect(`zookeeper://${hosts}`, { connectMs: 20_000, ...options })
    this.#services.push(service)
    return service
  }

  async closeServices() {
    await Promise.all(this.#services.splice(0).map((service) => service.close()))
  }

  async stop() {
    await this.closeServices()
    await this.servers.stop()
    await Promise.all([...this.links.values()].map((proxy) => proxy.close()))
  }
}

describe('zookeeper: three servers', () => {
  /** @type {Ensemble | undefined} */
  let ensemble
  before(async () => void (ensemble = await new Ensemble().start().catch(() => undefined)))
  after(() => ensemble?.stop())
  /** @param {string} name @param {(ensemble: Ensemble, options: { keyPrefix: string }) => Promise<void>} body */
  const test = (name, body) =>
    it(name, { timeout: 150_000 }, async (t) => {
      if (!(await canStartServer(t, 'zookeeper', locateZookeeper))) return
      assert.ok(ensemble, 'the servers have not started')
      try {
        await body(ensemble, { keyPrefix: `${random()}:` })
      } finally {
        for (const link of ensemble.links.values()) link.resume()
        for (const member of ensemble.servers.members) member.resume()
        await ensemble.closeServices()
      }
    })

  // The follower answers reads for some seconds more. With the rule of reads there were two holders for 8 s.
  test('a follower that is cut off from its leader holds no lock that the leader grants to another process', async (all, options) => {
    const { leader, followers } = await all.roles()
    const [cut, other] = followers
    const [a, b] = await Promise.all([all.connect([cut], options), all.connect([leader, other], options)])
    const lock = await a.acquire('n')
    const lost = new Promise((resolve) => lock.signal.addEventListener('abort', () => resolve(performance.now())))
    const waiting = b.acquire('n', { waitMs: 60_000 }).then((next) => ({ next, at: performance.now() }))
    await sleep(500)
    assert.ok(lock.isHeld)
    all.links.get(`${cut + 1}>${leader + 1}`)?.freeze()
    const cutAt = performance.now()
    const { next, at } = await waiting
    assert.equal(lock.isHeld, false, 'two holders')
    const lostAt = /** @type {number} */ (await lost)
    assert.ok(lostAt < at, `lost ${lostAt - at} ms after the next grant`)
    assert.ok(at - cutAt > 4000, 'the session lasts for a while')
    assert.ok(next.fencingToken > lock.fencingToken)
    await next.release()
  })

  for (const how of /** @type {const} */ (['kill', 'pause'])) {
    test(`a leader that is ${how === 'kill' ? 'killed' : 'stopped'}: locks and places stay, and calls go on`, async (all, options) => {
      const { leader } = await all.roles()
      const [a, b] = await Promise.all([all.connect([0, 1, 2], options), all.connect([0, 1, 2], options)])
      const lock = await a.acquire('n')
      let wasLost = false
      lock.signal.addEventListener('abort', () => (wasLost = true))
      const waiting = b.acquire('n', { waitMs: 100_000 })
      await until('the call waits', async () => (await a.inspect('n'))?.waiting === 1)
      const member = all.servers.members[leader]
      await member[how]()
      const next = await until('a call is served', () => a.tryAcquire('other').catch(() => undefined), 60_000)
      await next.release()
      // The election takes longer than some leases last on a slow machine: then the lock is lost in time.
      if (!wasLost) {
        assert.ok(lock.isHeld)
        assert.equal(await lock.release(), true)
      }
      const second = await waiting
      assert.ok(second.fencingToken > lock.fencingToken)
      assert.ok(!lock.isHeld)
      await second.release()
      if (how === 'kill') await member.restart()
      else member.resume()
      await all.roles()
    })
  }

  test('without a majority calls fail within their limit, and go on when it is back', async (all, options) => {
    const { leader, followers } = await all.roles()
    const a = await all.connect([leader], { ...options, storeTimeoutMs: 2000 })
    const lock = await a.acquire('n')
    const stopped = followers.map((index) => all.servers.members[index])
    for (const member of stopped) await member.kill()
    const began = performance.now()
    await assert.rejects(a.acquire('other', { waitMs: 1000 }), { code: 'LOCK_STORE', retryable: true })
    assert.ok(performance.now() - began < 6000)
    await until('the lock is lost', () => !lock.isHeld, 20_000)
    await Promise.all(stopped.map((member) => member.restart()))
    const next = await until('a call is served', () => a.tryAcquire('n').catch(() => undefined), 60_000)
    assert.ok(next.fencingToken > lock.fencingToken)
    await next.release()
  })
})
