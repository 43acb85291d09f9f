// MongoDB servers of a test's own: with users, and with whatever else a test asks for.
import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { it } from 'node:test'
import { LockService } from '../../index.js'
import { locateMongod, startMongod } from '../../scripts/servers.mjs'
import { rejection, assertLockError } from '../tools.mjs'

const TIMEOUT_MS = 120_000

/** In every password of these tests, and in no message of any error. */
export const SECRET = 'hush'

/**
 * Declares a test that needs servers of its own; `body` gets the tools, which clean up when it is over. A visible skip
 * where there is no mongod, and a failure in CI.
 */
export function withMongod(title, body) {
  it(title, { timeout: TIMEOUT_MS }, async (t) => {
    try {
      // Without this variable nobody asked for servers, and none is fetched for it.
      if (!process.env.HOLDFAST_TEST_MONGODB_URL) throw new Error('HOLDFAST_TEST_MONGODB_URL is not set')
      await locateMongod()
    } catch (error) {
      assert.ok(!process.env.CI, error.message)
      return t.skip(`no mongod: ${error.message}`)
    }
    const fixture = new MongodFixture()
    try {
      await body(fixture)
    } finally {
      await fixture.close()
    }
  })
}

class MongodFixture {
  #ends = []

  /** What to do at the end, the last one first. */
  onClose(end) {
    this.#ends.push(end)
  }

  async close() {
    for (const end of this.#ends.reverse()) await end()
  }

  folder() {
    const folder = mkdtempSync(join(tmpdir(), 'holdfast-test-'))
    this.onClose(() => rmSync(folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 }))
    return folder
  }

  async start(options) {
    const server = await startMongod(options)
    this.onClose(() => server.stop())
    return server
  }

  /** A server that asks for a login; `admin` is somebody who may do everything. */
  async startWithAuth({ replicaSet = false, args = [] } = {}) {
    const keyFile = join(this.folder(), 'key')
    // Members of a set ask each other for a key, too.
    writeFileSync(keyFile, randomBytes(48).toString('base64'), { mode: 0o600 })
    const key = replicaSet ? ['--keyFile', keyFile] : []
    const server = await this.start({ replicaSet, args: ['--auth', ...key, ...args] })
    // The first user may be made by whoever is on the machine.
    const nobody = await this.client(server, '', '')
    await nobody.db('admin').command({ createUser: 'root', pwd: `${SECRET}-root`, roles: ['root'] })
    return Object.assign(server, { admin: await this.client(server, `root:${SECRET}-root@`, '&authSource=admin') })
  }

  /** The official driver's client. */
  async client(server, login, options) {
    const { MongoClient } = await import('mongodb')
    const client = await MongoClient.connect(`mongodb://${login}127.0.0.1:${server.port}/?directConnection=true${options}`)
    this.onClose(() => client.close())
    return client
  }

  /** A service that is closed at the end. */
  async connect(url, options) {
    const service = await LockService.connect(url, options)
    this.onClose(() => service.close())
    return service
  }
}

/** The URL of a server with another login, path and options. */
export const urlOf = (server, { login = '', host = '127.0.0.1', path = '', options = '' } = {}) =>
  `mongodb://${login && `${login}@`}${host}:${server.port}/${path}${options && `?${options}`}`

/** The longest that `refuses` lets a call take that has to say why it failed. */
const LIMIT_MS = 3000
/** A mistake is told at once, long before this. */
const MISTAKE_LIMIT_MS = 30_000

/**
 * Connecting has to fail with a reason: `LOCK_STORE`, no password in it, and no mere time-out. What is for a human to mend
 * has to be told at once, and the rest within the limit.
 */
export async function assertConnectFails(url, { retryable, tls, why }) {
  const storeTimeoutMs = retryable ? LIMIT_MS : MISTAKE_LIMIT_MS
  const start = performance.now()
  const error = await rejection(LockService.connect(url, { storeTimeoutMs, ...(tls && { tls }) }))
  const tookMs = performance.now() - start
  assertLockError(error, 'LOCK_STORE', { engine: 'mongodb' })
  assert.match(error.message, why)
  assert.equal(error.retryable, retryable, error.message)
  assert.doesNotMatch(`${error.stack} ${error.cause?.stack} ${JSON.stringify(error)}`, new RegExp(SECRET))
  assert.doesNotMatch(error.message, /labels|Topology|no answer within/, 'in words for humans')
  assert.ok(tookMs < (retryable ? LIMIT_MS + 1000 : MISTAKE_LIMIT_MS / 2), `${tookMs} ms`)
  return error
}
