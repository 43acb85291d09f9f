// The fixture of the failover tests: a replica set of three members, its faults, and a load.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { mongoCommand, startMongoReplicaSet } from '../scripts/topologies.mjs'
import { LockService } from '../index.js'
import { directUrl, withMongo } from './mongodb-client.mjs'
import { random, skip } from './stores.mjs'
import { sleep, until } from './tools.mjs'

/** The limit for an election and the recovery after it. Both take seconds; the rest is for a busy machine. */
export const FAILOVER_TIMEOUT_MS = 60_000

/** How much longer than its limit a call may take: for a slow machine. */
export const SLACK_MS = 3000

/**
 * URL options: the driver detects a hanging primary after 2.5 s and retries the call on the next one. With the driver's
 * defaults that takes much longer than an election, and most calls reach their limit before.
 */
export const FAST_MONITORING = '&connectTimeoutMS=2000&heartbeatFrequencyMS=500'

/**
 * One test's services, prefix and collection on the set.
 *
 * @typedef {Awaited<ReturnType<typeof startMongoReplicaSet>>} ReplicaSet
 * @typedef {ReplicaSet['members'][number]} Member
 */
class ReplicaSetFixture {
  /** @type {LockService[]} */
  #services = []

  /** @param {ReplicaSet} set */
  constructor(set) {
    this.set = set
    this.options = { keyPrefix: `${random()}:`, collection: `locks_${random()}` }
  }

  // These are properties, so that tests can destructure them.
  /** @param {import('../index.js').ConnectOptions} [options] */
  connect = async (options, url = this.set.url) => {
    const service = await LockService.connect(url, { ...this.options, ...options })
    this.#services.push(service)
    return service
  }

  /** @param {number} count @param {import('../index.js').ConnectOptions} [options] */
  connectAll = (count, options) => Promise.all(Array.from({ length: count }, () => this.connect(options)))

  /**
   * Reads the document of a name on one member.
   *
   * @param {string} name
   * @param {Member} member
   */
  document = (name, member) =>
    withMongo(directUrl(member.port), (client) => {
      /** @type {import('mongodb').Collection<any>} */
      const locks = client.db().collection(this.options.collection)
      return locks.findOne({ _id: `${this.options.keyPrefix}${name}` })
    })

  /** @param {LockService} [keep] */
  async close(keep) {
    await Promise.all(this.#services.filter((service) => service !== keep).map((service) => service.close()))
  }
}

/**
 * Declares a group of tests with a separate replica set, one after the other. A test gets `(fixture, t)`, and must leave
 * nothing in the store. All members of the set are up when it begins.
 *
 * @typedef {(fixture: ReplicaSetFixture, t: import('node:test').TestContext) => unknown} Body
 * @param {string} title
 * @param {{ args?: string[] }} options
 * @param {(test: (name: string, body: Body) => void) => void} define
 */
export function replicaSetSuite(title, { args = [] }, define) {
  describe(`mongodb, three members: ${title}`, () => {
    /** @type {ReplicaSet | Error} */
    let set
    before(async () => void (set = await startMongoReplicaSet({ args }).catch((/** @type {Error} */ error) => error)))
    after(() => (set instanceof Error ? undefined : set.stop()))
    define((name, body) =>
      it(name, { timeout: 180_000 }, async (t) => {
        if (set instanceof Error) return skip(t, set.message)
        await set.ready()
        const fixture = new ReplicaSetFixture(set)
        try {
          await body(fixture, t)
          const witness = await fixture.connect({ storeTimeoutMs: FAILOVER_TIMEOUT_MS })
          await fixture.close(witness)
          // Locks of failed calls are released in the background, or expire.
          await until('nothing is left', async () => (await witness.list()).length === 0, FAILOVER_TIMEOUT_MS)
        } finally {
          await fixture.close()
        }
      }))
  })
}

/** Waits for a primary other than `old`. Resolves to it. */
export async function newPrimary(set, old) {
  return until(
    'a new primary',
    async () => {
      const primary = await set.primary()
      return primary !== old && primary
    },
    FAILOVER_TIMEOUT_MS,
  )
}

/** Returns a function that applies `fault` to the primary, and resolves to that member. */
const onPrimary = (fault) => async (set) => {
  const old = await until('a primary', set.primary)
  await fault(old)
  return old
}

/**
 * The faults of a primary: `begin(set)` resolves to the old primary, `end(old)` makes it a normal member again.
 * `ttlMs`: longer than it takes until writes are acknowledged again, also on a busy machine. After a pause of the primary that
 * is usually the time of the election, but half a minute when the third member tries to replicate from it again.
 */
export const FAULTS = {
  'a step-down': {
    ttlMs: 15_000,
    begin: (set) => set.stepDown({ seconds: 120, force: true }),
    end: (old) => mongoCommand(old, { replSetFreeze: 0 }),
  },
  'the SIGKILL of the primary': {
    ttlMs: 15_000,
    begin: onPrimary((old) => old.kill()),
    end: (old) => old.restart(),
  },
  'a pause of the primary': {
    ttlMs: 45_000,
    begin: onPrimary((old) => old.pause()),
    end: async (old) => old.resume(),
  },
}

/** Leaves the set without a primary until `end()`: the primary steps down, and no member may be elected. */
export async function withoutPrimary(set) {
  const primary = await until('a primary', set.primary)
  const freeze = (seconds) => (member) => mongoCommand(member, { replSetFreeze: seconds })
  await Promise.all(set.members.filter((member) => member !== primary).map(freeze(120)))
  assert.equal(await set.stepDown({ seconds: 120, force: true }), primary)
  return { end: () => Promise.all(set.members.map(freeze(0))) }
}

/**
 * Stops replication, but not heartbeats, until `end()`: writes meanwhile never reach a majority. The members must have been
 * started with `TEST_COMMANDS`.
 */
export async function withoutReplication(set) {
  const primary = await until('a primary', set.primary)
  const secondaries = set.members.filter((member) => member !== primary)
  const failPoint = (mode) => (member) => mongoCommand(member, { configureFailPoint: 'stopReplProducer', mode })
  await Promise.all(secondaries.map(failPoint('alwaysOn')))
  return { primary, end: () => Promise.all(secondaries.map(failPoint('off'))) }
}

export const TEST_COMMANDS = ['--setParameter', 'enableTestCommands=1']

/** Waits until a member has rolled back its unreplicated writes, which it does after `fault`. */
export async function waitForRollback(member, fault) {
  const count = async () => (await mongoCommand(member, { replSetGetRBID: 1 })).rbid
  const before = await count()
  await fault()
  // During the rollback the member may close connections.
  await until(
    'writes are rolled back',
    () =>
      count().then(
        (rbid) => rbid > before,
        () => false,
      ),
    FAILOVER_TIMEOUT_MS,
  )
}

/** Moves the cluster's logical clock ahead of the wall clock by `seconds`. */
export async function advanceClusterTime(member, seconds) {
  const { Binary, Long, Timestamp } = await import('mongodb')
  const clusterTime = new Timestamp({ t: Math.floor(Date.now() / 1000) + seconds, i: 1 })
  await withMongo(directUrl(member.port), (client) =>
    client.withSession(async (session) => {
      // Without authentication the signature is not checked.
      session.advanceClusterTime({ clusterTime, signature: { hash: new Binary(Buffer.alloc(20)), keyId: Long.ZERO } })
      await client.db('admin').command({ ping: 1 }, { session })
    }),
  )
}

const STORE_TIMEOUT_MS = 4000
const WAIT_MS = 6000
const TTL_MS = 5000

/** Services that acquire and release a few names in a loop, and check that each name has one holder at a time. */
export class Load {
  static STORE_TIMEOUT_MS = STORE_TIMEOUT_MS
  /** @type {Map<string, Set<import('../index.js').Lock>>} */
  #holders = new Map()
  /** @type {Map<string, bigint>} */
  #tokens = new Map()
  #isStopped = false
  /** @type {Promise<void>[]} */
  #work = []
  /** @type {Record<string, number>} */
  #failed = {}
  granted = 0

  /** Starts `workers` loops in each service. Each acquisition is for one of the names, or for two. */
  constructor(services, { names, workers }) {
    for (const name of names) this.#holders.set(name, new Set())
    for (const service of services) {
      for (let worker = 0; worker < workers; worker++) this.#work.push(this.#run(service, names))
    }
    // `end()` throws the errors.
    this.#work.forEach((work) => work.catch(() => (this.#isStopped = true)))
  }

  get summary() {
    return `${this.granted} grants, calls that failed: ${JSON.stringify(this.#failed)}`
  }

  /** Waits for `count` more grants. */
  waitForGrants(count = 1) {
    const enough = this.granted + count
    return until('more grants', () => this.#isStopped || this.granted >= enough, FAILOVER_TIMEOUT_MS)
  }

  /** Ends the load, and throws its first error. */
  async end() {
    this.#isStopped = true
    await Promise.all(this.#work)
  }

  async #run(service, names) {
    while (!this.#isStopped) {
      const first = Math.floor(Math.random() * names.length)
      const wanted = Math.random() < 0.75 ? [names[first]] : [names[first], names[(first + 1) % names.length]]
      const lock = await this.#within(WAIT_MS + STORE_TIMEOUT_MS, () =>
        service.acquire(wanted, { waitMs: WAIT_MS, ttlMs: TTL_MS }),
      )
      if (!lock) continue
      this.#enter(lock)
      await sleep(Math.random() * 5)
      // From the call on, another service may be granted the name.
      for (const name of lock.names) this.#holders.get(name)?.delete(lock)
      await this.#within(STORE_TIMEOUT_MS, () => lock.release())
    }
  }

  #enter(lock) {
    if (lock.isHeld) this.granted++
    for (const name of lock.names) {
      const holders = /** @type {Set<import('../index.js').Lock>} */ (this.#holders.get(name))
      const others = [...holders].filter((other) => other.isHeld)
      assert.ok(
        !lock.isHeld || others.length === 0,
        `${name} is held twice: ${lock.fencingToken}, ${others[0]?.fencingToken}`,
      )
      holders.add(lock)
      const last = this.#tokens.get(name) ?? 0n
      assert.ok(lock.fencingToken > last, `${name}: the token ${lock.fencingToken} after ${last}`)
      this.#tokens.set(name, lock.fencingToken)
    }
  }

  /** Makes a call. Resolves to its result, or to `undefined` when it failed with an error that an election may cause. */
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
