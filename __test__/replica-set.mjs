// The setting of the tests of a fail-over: a replica set of three members, what can befall it, and a load to bear that.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { mongoCommand, startMongoReplicaSet } from '../scripts/topologies.mjs'
import { LockService } from '../index.js'
import { random } from './stores.mjs'
import { sleep, until } from './tools.mjs'

/** A new primary, and the service that it brings back, come in seconds; a busy machine is given more. */
export const PATIENCE_MS = 60_000

/** What a call may take beyond its limit: the rest is for a slow machine. */
export const SLACK_MS = 3000

/**
 * For URLs: a call that hangs at a primary that hangs is sent to its successor when the driver has had no word of the old
 * one for 2.5 s. As the driver comes that takes much longer than an election, and most calls have reached their limit.
 */
export const WATCHFUL = '&connectTimeoutMS=2000&heartbeatFrequencyMS=500'

/** One test's view of the set: services, names and a collection of its own. */
class ReplicaSetFixture {
  #services = []

  constructor(set) {
    this.set = set
    this.options = { keyPrefix: `${random()}:`, collection: `locks_${random()}` }
  }

  // These are properties, so that a test can take out what it needs.
  connect = async (options, url = this.set.url) => {
    const service = await LockService.connect(url, { ...this.options, ...options })
    this.#services.push(service)
    return service
  }

  connectAll = (count, options) => Promise.all(Array.from({ length: count }, () => this.connect(options)))

  /** The document of a name on one member, as far as that one knows. */
  document = async (name, member) => {
    const { MongoClient } = await import('mongodb')
    const client = new MongoClient(`mongodb://127.0.0.1:${member.port}/holdfast?directConnection=true`)
    try {
      const locks = client.db().collection(this.options.collection)
      return await locks.findOne({ _id: `${this.options.keyPrefix}${name}` })
    } finally {
      await client.close()
    }
  }

  async close(keep) {
    await Promise.all(this.#services.filter((service) => service !== keep).map((service) => service.close()))
  }
}

/**
 * A group of tests with a replica set of their own, one after the other. A test gets `(scene, t)`, and must leave nothing
 * in the store; the set is whole when it begins.
 */
export function replicaSetSuite(title, { args } = {}, define) {
  describe(`mongodb, three members: ${title}`, () => {
    let set
    before(async () => void (set = await startMongoReplicaSet({ args }).catch((error) => ({ trouble: error.message }))))
    after(() => set.stop?.())
    define((name, body) =>
      it(name, { timeout: 180_000 }, async (t) => {
        if (set.trouble) {
          assert.ok(!process.env.CI, set.trouble)
          return t.skip(set.trouble)
        }
        await set.whole()
        const fixture = new ReplicaSetFixture(set)
        try {
          await body(fixture, t)
          const witness = await fixture.connect({ storeTimeoutMs: PATIENCE_MS })
          await fixture.close(witness)
          // What a call gave up on is given back behind its back, or expires.
          await until('nothing is left', async () => (await witness.list()).length === 0, PATIENCE_MS)
        } finally {
          await fixture.close()
        }
      }),
    )
  })
}

/** Waits for a primary other than `old`; gives it. */
export async function successor(set, old) {
  return until('a new primary', async () => {
    const primary = await set.primary()
    return primary !== old && primary
  }, PATIENCE_MS)
}

/** Does something to whoever is the primary, and gives that one. */
const befalls = (harm) => async (set) => {
  const old = await until('a primary', set.primary)
  await harm(old)
  return old
}

/**
 * What a primary can suffer: `begin(set)` gives the old primary, `end(old)` makes it a member like the others again.
 * `ttlMs`: longer than it takes until writes are acknowledged again, also on a busy machine. Where the old primary hangs
 * that is mostly the time of the election, but half a minute when the third member turns to it once more.
 */
export const TROUBLES = {
  'a step-down': {
    ttlMs: 15_000,
    begin: (set) => set.stepDown({ seconds: 120, force: true }),
    end: (old) => mongoCommand(old, { replSetFreeze: 0 }),
  },
  'the SIGKILL of the primary': {
    ttlMs: 15_000,
    begin: befalls((old) => old.kill()),
    end: (old) => old.restart(),
  },
  'a pause of the primary': {
    ttlMs: 45_000,
    begin: befalls((old) => old.pause()),
    end: async (old) => old.resume(),
  },
}

/** Leaves the set without a primary until `end()`: the old one steps down, and nobody may be elected. */
export async function withoutPrimary(set) {
  const primary = await until('a primary', set.primary)
  const freeze = (seconds) => (member) => mongoCommand(member, { replSetFreeze: seconds })
  await Promise.all(set.members.filter((member) => member !== primary).map(freeze(120)))
  assert.equal(await set.stepDown({ seconds: 120, force: true }), primary)
  return { end: () => Promise.all(set.members.map(freeze(0))) }
}

/**
 * Cuts the secondaries off from what the primary writes, though not from its heartbeats, until `end()`: nothing that is
 * written meanwhile reaches a majority. The members must have been started with `TEST_COMMANDS`.
 */
export async function withoutReplication(set) {
  const primary = await until('a primary', set.primary)
  const secondaries = set.members.filter((member) => member !== primary)
  const failPoint = (mode) => (member) => mongoCommand(member, { configureFailPoint: 'stopReplProducer', mode })
  await Promise.all(secondaries.map(failPoint('alwaysOn')))
  return { primary, end: () => Promise.all(secondaries.map(failPoint('off'))) }
}

export const TEST_COMMANDS = ['--setParameter', 'enableTestCommands=1']

/** Waits until a member has taken back writes that the others never had, as it does after `trouble`. */
export async function takesBack(member, trouble) {
  const count = async () => (await mongoCommand(member, { replSetGetRBID: 1 })).rbid
  const before = await count()
  await trouble()
  // While it does so, it may close connections.
  await until('writes are taken back', () => count().then((rbid) => rbid > before, () => false), PATIENCE_MS)
}

/** Has a member believe that the cluster's logical clock is so far ahead of its wall clock. */
export async function advanceClusterTime(member, seconds) {
  const { Binary, Long, MongoClient, Timestamp } = await import('mongodb')
  const client = new MongoClient(`mongodb://127.0.0.1:${member.port}/?directConnection=true`)
  try {
    const clusterTime = new Timestamp({ t: Math.floor(Date.now() / 1000) + seconds, i: 1 })
    await client.withSession(async (session) => {
      // Without users nobody signs it.
      session.advanceClusterTime({ clusterTime, signature: { hash: new Binary(Buffer.alloc(20)), keyId: Long.ZERO } })
      await client.db('admin').command({ ping: 1 }, { session })
    })
  } finally {
    await client.close()
  }
}

const STORE_TIMEOUT_MS = 4000
const WAIT_MS = 6000
const TTL_MS = 5000

/** Services that take and release a few names again and again, and look whether anybody else is there. */
export class Load {
  static STORE_TIMEOUT_MS = STORE_TIMEOUT_MS
  #holders = new Map()
  #tokens = new Map()
  #isOver = false
  #work = []
  #failed = {}
  granted = 0

  /** `workers` callers in each service; each takes one of the names, or two. */
  constructor(services, { names, workers }) {
    for (const name of names) this.#holders.set(name, new Set())
    for (const service of services) {
      for (let worker = 0; worker < workers; worker++) this.#work.push(this.#run(service, names))
    }
    // What goes wrong is told by `end()`.
    this.#work.forEach((work) => work.catch(() => (this.#isOver = true)))
  }

  get summary() {
    return `${this.granted} grants, calls that failed: ${JSON.stringify(this.#failed)}`
  }

  /** Waits until the work has gone on, by so much. */
  goesOn(count = 1) {
    const enough = this.granted + count
    return until('the work goes on', () => this.#isOver || this.granted >= enough, PATIENCE_MS)
  }

  /** Ends the work, and throws what went wrong with it. */
  async end() {
    this.#isOver = true
    await Promise.all(this.#work)
  }

  async #run(service, names) {
    while (!this.#isOver) {
      const first = Math.floor(Math.random() * names.length)
      const wanted = Math.random() < 0.75 ? [names[first]] : [names[first], names[(first + 1) % names.length]]
      const lock = await this.#within(WAIT_MS + STORE_TIMEOUT_MS, () => service.acquire(wanted, { waitMs: WAIT_MS, ttlMs: TTL_MS }))
      if (!lock) continue
      this.#enter(lock)
      await sleep(Math.random() * 5)
      // From the call on, the name may be somebody else's.
      for (const name of lock.names) this.#holders.get(name).delete(lock)
      await this.#within(STORE_TIMEOUT_MS, () => lock.release())
    }
  }

  #enter(lock) {
    if (lock.isHeld) this.granted++
    for (const name of lock.names) {
      const others = [...this.#holders.get(name)].filter((other) => other.isHeld)
      assert.ok(!lock.isHeld || others.length === 0, `${name} is held twice: ${lock.fencingToken}, ${others[0]?.fencingToken}`)
      this.#holders.get(name).add(lock)
      const last = this.#tokens.get(name) ?? 0n
      assert.ok(lock.fencingToken > last, `${name}: the token ${lock.fencingToken} after ${last}`)
      this.#tokens.set(name, lock.fencingToken)
    }
  }

  /** What the call gives; nothing when it failed as it may in an election. */
  async #within(limitMs, call) {
    const startedAt = performance.now()
    try {
      return await call()
    } catch (error) {
      const mayFail = error.code === 'LOCK_TIMEOUT' || (error.code === 'LOCK_STORE' && error.retryable)
      if (!mayFail) throw error
      this.#failed[error.code] = (this.#failed[error.code] ?? 0) + 1
    } finally {
      const tookMs = performance.now() - startedAt
      assert.ok(tookMs < limitMs + SLACK_MS, `a call took ${tookMs} ms`)
    }
  }
}
