// How to open each store for a test: a place of its own that no other test (nor anybody else's data) can disturb.
import { randomBytes } from 'node:crypto'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, describe, it } from 'node:test'
import assert from 'node:assert/strict'
import { LockService } from '../index.js'

/**
 * What the contract has to know of each kind of store.
 * - `engine`: its name in errors.
 * - `ordered`: whether it serves the waiters of all processes in the order of arrival.
 * - `server`: the variable with the URL of a real server, where one is needed; of several, separated by commas.
 */
export const KINDS = {
  memory: { engine: 'memory', ordered: true },
  sqlite: { engine: 'sqlite', ordered: true },
  redis: { engine: 'redis', ordered: true, server: 'HOLDFAST_TEST_REDIS_URL' },
  'redis-cluster': { engine: 'redis', ordered: true, server: 'HOLDFAST_TEST_REDIS_CLUSTER_URL' },
  'redis-sentinel': { engine: 'redis', ordered: true, server: 'HOLDFAST_TEST_REDIS_SENTINEL_URL' },
  'redis-quorum': { engine: 'redis', ordered: false, server: 'HOLDFAST_TEST_REDIS_QUORUM_URLS' },
  mongodb: { engine: 'mongodb', ordered: false, server: 'HOLDFAST_TEST_MONGODB_URL' },
  'mongodb-replica-set': { engine: 'mongodb', ordered: true, server: 'HOLDFAST_TEST_MONGODB_RS_URL' },
}

/** Random text, for names that nobody else uses. */
export const random = () => randomBytes(6).toString('hex')

/** The URL of a kind's test server, or a list of them. */
export function serverUrl(kind) {
  const { server } = KINDS[kind]
  const url = process.env[server]
  // One URL may have commas, too: between the nodes of a cluster.
  return server?.endsWith('_URLS') ? url?.split(',') : url
}

/** Why a kind cannot be tested here; `undefined` when it can. */
export function missing(kind) {
  const { server } = KINDS[kind]
  return server && !process.env[server] ? `no ${kind}: ${server} is not set` : undefined
}

// One collection per test file; the tests in it differ by prefix.
const collection = `test_${random()}`
const used = new Map()

/** A fresh, empty store. `connect()` may be called as often as a test wants; `close()` ends whatever is open. */
export class TestStore {
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
      this.target = serverUrl(kind)
      this.options.keyPrefix = `test:${random()}:`
      if (this.engine === 'mongodb') {
        this.options.collection = collection
        this.dropAtEnd(collection)
      }
    }
  }

  /** Has a MongoDB collection removed when the tests of this file are over. */
  dropAtEnd(name) {
    used.set(this.kind, (used.get(this.kind) ?? new Set()).add(name))
  }

  async connect(options = {}) {
    const service = await LockService.connect(this.target, { ...this.options, ...options })
    this.#services.push(service)
    return service
  }

  /** Several services, which the store takes for as many processes. */
  connectAll(count, options) {
    return Promise.all(Array.from({ length: count }, () => this.connect(options)))
  }

  /** Closes every service that is open, but not `keep`. */
  async closeServices(keep) {
    const services = this.#services.filter((service) => service !== keep)
    this.#services = keep ? [keep] : []
    await Promise.all(services.map((service) => service.close()))
  }

  async close() {
    await this.closeServices()
    // Windows may take a moment to let go of a file that was closed.
    if (this.#folder) rmSync(this.#folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 })
  }
}

/** Removes the collections that this file made. */
async function dropCollections() {
  if (used.size === 0) return
  const { MongoClient } = await import('mongodb')
  for (const [kind, names] of used) {
    const client = await MongoClient.connect(serverUrl(kind))
    for (const name of names) await client.db().dropCollection(name)
    await client.close()
  }
}

const TIMEOUT_MS = 90_000

/**
 * A group of tests on one kind of store, four of them at a time unless `options` has another `concurrency`. `define` gets a
 * function that declares a test, and what is known of the kind:
 * `test(title, body)`, whose body gets a fresh `Place`, and must leave nothing locked there once its services are
 * closed, unless it says `place.leaves = true`.
 */
export function suite(kind, title, options, define) {
  if (!define) [options, define] = [{}, options]
  const reason = missing(kind)
  if (reason) {
    it(`${kind}: ${title}`, (t) => {
      assert.ok(!process.env.CI, reason)
      t.skip(reason)
    })
    return
  }
  // Most tests wait for a ttl most of the time.
  describe(`${kind}: ${title}`, { concurrency: 4, ...options }, () => {
    const test = (name, body) => it(name, { timeout: TIMEOUT_MS }, (t) => withStore(kind, (store) => body(store, t)))
    define(test, KINDS[kind])
  })
}

/** Runs `body` in a fresh place, and looks whether it left anything there. */
export async function withStore(kind, body) {
  const store = new TestStore(kind)
  try {
    await body(store)
    // What a memory store keeps goes with its last service.
    const witness = await store.connect()
    await store.closeServices(witness)
    if (!store.mayLeaveLocks) assert.deepEqual(await witness.list(), [], 'the test left locks behind')
  } finally {
    await store.close()
  }
}

after(dropCollections)
