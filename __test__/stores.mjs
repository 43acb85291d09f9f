// Opens each kind of store for a test, separated from other tests and from other data by a prefix, a file or a collection.
import { randomBytes } from 'node:crypto'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, describe, it } from 'node:test'
import assert from 'node:assert/strict'
import { LockService } from '../index.js'
import { withMongo } from './mongodb-client.mjs'

/**
 * What the contract depends on for each kind of store.
 * - `engine`: its name in errors.
 * - `ordered`: whether it serves the waiters of all processes in the order of arrival.
 * - `shares`: whether it has semaphores and read/write locks.
 * - `server`: the variable with the URL of the server, if the store needs one; several URLs are separated by commas.
 * - `query`: what the tests append to this URL.
 * - `deadMs`: how long a dead process delays others, if that is longer than its ttl (with `useShortSessions`).
 * - `losesPositions`: whether the waiters of a process that was suspended for as long go to the end of the queue.
 * - `longestMs`: the longest lease without a renewal, where a lease ends with a session.
 * - `clockErrorMs`: how much longer than its ttl a lease may last, where its end is computed from an estimate of the server's clock.
 * - `mostNames`: the maximum number of names of one lock, if it is below 1000.
 */
export const KINDS = {
  memory: { engine: 'memory', ordered: true, shares: true },
  sqlite: { engine: 'sqlite', ordered: true, shares: true },
  redis: { engine: 'redis', ordered: true, shares: true, server: 'HOLDFAST_TEST_REDIS_URL' },
  'redis-cluster': { engine: 'redis', ordered: true, shares: true, server: 'HOLDFAST_TEST_REDIS_CLUSTER_URL' },
  'redis-sentinel': { engine: 'redis', ordered: true, shares: true, server: 'HOLDFAST_TEST_REDIS_SENTINEL_URL' },
  'redis-quorum': { engine: 'redis', ordered: false, server: 'HOLDFAST_TEST_REDIS_QUORUM_URLS' },
  mongodb: { engine: 'mongodb', ordered: false, server: 'HOLDFAST_TEST_MONGODB_URL', clockErrorMs: 100 },
  'mongodb-replica-set': {
    engine: 'mongodb',
    ordered: true,
    shares: true,
    server: 'HOLDFAST_TEST_MONGODB_RS_URL',
    clockErrorMs: 100,
  },
  postgres: { engine: 'postgres', ordered: true, shares: true, server: 'HOLDFAST_TEST_POSTGRES_URL' },
  // Behind PgBouncer in transaction mode, which the service detects, or which its URL declares.
  'postgres-pooler': { engine: 'postgres', ordered: true, shares: true, server: 'HOLDFAST_TEST_PGBOUNCER_URL' },
  'postgres-pooler-declared': {
    engine: 'postgres',
    ordered: true,
    shares: true,
    server: 'HOLDFAST_TEST_PGBOUNCER_URL',
    query: '?pooler=transaction',
  },
  mysql: { engine: 'mysql', ordered: true, shares: true, server: 'HOLDFAST_TEST_MYSQL_URL' },
  etcd: {
    engine: 'etcd',
    ordered: true,
    shares: true,
    server: 'HOLDFAST_TEST_ETCD_URL',
    mostNames: 60,
    deadMs: 5500,
    losesPositions: true,
  },
  zookeeper: {
    engine: 'zookeeper',
    ordered: true,
    shares: true,
    server: 'HOLDFAST_TEST_ZOOKEEPER_URL',
    mostNames: 60,
    deadMs: 5500,
    losesPositions: true,
    longestMs: 5000,
  },
}

/** Returns random text for unique names. */
export const random = () => randomBytes(6).toString('hex')

/** Returns the URL of a kind's test server, or a list of URLs. */
export function serverUrl(kind) {
  const { server, query } = KINDS[kind]
  const url = process.env[server]
  if (url && query) return `${url}${query}`
  // A single URL may contain commas, too: between the nodes of a cluster.
  return server?.endsWith('_URLS') ? url?.split(',') : url
}

/**
 * Calls `connect` with arguments that TypeScript cannot check: wrong ones, or those of several signatures.
 *
 * @param {unknown[]} args
 * @returns {Promise<LockService>}
 */
export const connectWith = (...args) => Reflect.apply(LockService.connect, LockService, args)

/** Returns why a kind cannot be tested here; `undefined` when it can. */
export function missing(kind) {
  const { server } = KINDS[kind]
  return server && !process.env[server] ? `no ${kind}: ${server} is not set` : undefined
}

/** Skips a test that needs something that is missing here. In CI this is a failure. */
export function skip(t, reason) {
  assert.ok(!process.env.CI, reason)
  t.skip(reason)
}

/**
 * Whether a test can start its own servers of a kind. Otherwise it skips the test.
 *
 * If the kind's variable is not set, the tests run without servers, and no binary is fetched.
 */
export async function canStartServer(t, kind, locate) {
  const reason =
    missing(kind) ??
    (await locate().then(
      () => undefined,
      (error) => `no ${kind}: ${error.message}`,
    ))
  if (reason) skip(t, reason)
  return reason === undefined
}

// One collection per test file; its tests have different prefixes.
const collection = `test_${random()}`
const used = new Map()

/** An empty store. `connect()` may be called any number of times; `close()` closes all services. */
export class TestStore {
  /** Set by a test that leaves locks behind. */
  mayLeaveLocks = false
  #services = []
  #folder

  constructor(kind) {
    this.kind = kind
    Object.assign(this, KINDS[kind])
    this.options = {}
    if (kind === 'memory') {
      this.target = `memory:${random()}`
    } else if (kind === 'sqlite') {
      this.#folder = mkdtempSync(join(tmpdir(), 'holdfast-test-'))
      this.target = `sqlite:${join(this.#folder, 'locks.sqlite')}`
    } else {
      // `suite` skips a kind whose variable is not set.
      this.target = /** @type {string | string[]} */ (serverUrl(kind))
      this.options.keyPrefix = `test:${random()}:`
      if (KINDS[kind].engine === 'mongodb') {
        this.options.collection = collection
        this.dropAtEnd(collection)
      }
    }
  }

  /** Drops a MongoDB collection when the tests of this file have ended. */
  dropAtEnd(name) {
    used.set(this.kind, (used.get(this.kind) ?? new Set()).add(name))
  }

  /**
   * Uses sessions that end soon after a process has died, where entries end with a session: in other processes, which get `options`. The
   * services of the test keep longer ones, which a machine that stands still does not end.
   */
  useShortSessions() {
    if (KINDS[this.kind].longestMs) this.options.sessionTimeoutMs = 4000
  }

  /** Returns how long a lease with this ttl lasts at most without a renewal, as another service finds it. */
  lasting(ttlMs) {
    return Math.min(ttlMs, KINDS[this.kind].longestMs ?? ttlMs) + (KINDS[this.kind].clockErrorMs ?? 0)
  }

  /** @param {import('../index.js').ConnectOptions} [options] */
  async connect(options = {}) {
    // A busy machine may need several attempts.
    const repeated = options.lazy ? {} : { connectMs: 20_000 }
    const { sessionTimeoutMs: _, ...own } = this.options
    const service = await LockService.connect(this.target, { ...repeated, ...own, ...options })
    this.#services.push(service)
    return service
  }

  /** Connects several services. The store treats each one like a separate process. */
  connectAll(count, options) {
    return Promise.all(Array.from({ length: count }, () => this.connect(options)))
  }

  /** Closes every open service but `keep`. */
  async closeServices(keep) {
    const services = this.#services.filter((service) => service !== keep)
    this.#services = keep ? [keep] : []
    await Promise.all(services.map((service) => service.close()))
  }

  async close() {
    await this.closeServices()
    // On Windows a closed file may stay locked for a moment.
    if (this.#folder) rmSync(this.#folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 })
  }
}

/** Drops the collections of this file. */
async function dropCollections() {
  for (const [kind, names] of used) {
    await withMongo(String(serverUrl(kind)), async (client) => {
      for (const name of names) await client.db().dropCollection(name)
    })
  }
}

const TIMEOUT_MS = 90_000

/**
 * Declares a group of tests on one kind of store, four at a time unless `options` has another `concurrency`. `define` gets
 * `(test, kind)`: `test(title, body)` declares a test. Its body gets `(store, t)` with an empty `TestStore`, and must leave no
 * locks there once its services are closed, unless it sets `store.mayLeaveLocks = true`.
 */
export function suite(kind, title, options, define) {
  if (!define) [options, define] = [{}, options]
  const reason = missing(kind)
  if (reason) {
    it(`${kind}: ${title}`, (t) => skip(t, reason))
    return
  }
  // Most tests spend most of their time waiting for a ttl.
  describe(`${kind}: ${title}`, { concurrency: 4, ...options }, () => {
    const test = (name, body) => it(name, { timeout: TIMEOUT_MS }, (t) => withStore(kind, (store) => body(store, t)))
    define(test, KINDS[kind])
  })
}

/** Runs `body` with an empty store, and checks that it left no locks there. */
export async function withStore(kind, body) {
  const store = new TestStore(kind)
  try {
    await body(store)
    // The content of a memory store ends with its last service.
    const witness = await store.connect()
    await store.closeServices(witness)
    if (!store.mayLeaveLocks) assert.deepEqual(await witness.list(), [], 'the test left locks behind')
  } finally {
    await store.close()
  }
}

after(dropCollections)
