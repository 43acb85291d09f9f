// MongoDB servers that one test starts: with users, TLS or other options.
import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { it } from 'node:test'
import { LockService } from '../../index.js'
import { locateMongod, startMongod } from '../../scripts/servers.mjs'
import { canStartServer } from '../stores.mjs'
import { rejection, assertLockError, stallwatch, stopwatch } from '../tools.mjs'

const TIMEOUT_MS = 120_000

/** Part of every password in these tests. No error may contain it. */
export const SECRET = 'hush'

/**
 * Declares a test that starts its own servers. `body` gets a fixture, which is closed at the end. Without mongod the test is
 * skipped; in CI it fails.
 */
export function withMongod(title, body) {
  it(title, { timeout: TIMEOUT_MS }, async (t) => {
    if (!(await canStartServer(t, 'mongodb', locateMongod))) return
    const fixture = new MongodFixture()
    try {
      await body(fixture)
    } finally {
      await fixture.close()
    }
  })
}

export class MongodFixture {
  /** @type {(() => unknown)[]} */
  #ends = []

  /** Registers a clean-up. The last one runs first. */
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

  /** Starts a server that requires a login. Its property `admin` is a client with all rights. */
  async startWithAuth({ replicaSet = false, args = /** @type {string[]} */ ([]) } = {}) {
    const keyFile = join(this.folder(), 'key')
    // Members of a set authenticate each other with a key.
    writeFileSync(keyFile, randomBytes(48).toString('base64'), { mode: 0o600 })
    const key = replicaSet ? ['--keyFile', keyFile] : []
    const server = await this.start({ replicaSet, args: ['--auth', ...key, ...args] })
    // Before the first user exists, a local client may create one without a login.
    const local = await this.client(server, '', '')
    await local.db('admin').command({ createUser: 'root', pwd: `${SECRET}-root`, roles: ['root'] })
    return Object.assign(server, { admin: await this.client(server, `root:${SECRET}-root@`, '&authSource=admin') })
  }

  /** Opens a client of the official driver. */
  async client(server, login, options) {
    const { MongoClient } = await import('mongodb')
    const client = await MongoClient.connect(
      `mongodb://${login}127.0.0.1:${server.port}/?directConnection=true${options}`,
    )
    this.onClose(() => client.close())
    return client
  }

  /** Connects a service that is closed at the end. */
  async connect(url, options) {
    const service = await LockService.connect(url, options)
    this.onClose(() => service.close())
    return service
  }
}

/** Returns a server's URL with this login, path and options. */
export const urlOf = (server, { login = '', host = '127.0.0.1', path = '', options = '' } = {}) =>
  `mongodb://${login && `${login}@`}${host}:${server.port}/${path}${options && `?${options}`}`

/** The limit for a retryable error. */
const RETRYABLE_LIMIT_MS = 3000
/** The store timeout for a permanent error, which must be reported long before. */
const PERMANENT_LIMIT_MS = 30_000

/**
 * Asserts that `connect` fails with a cause: `LOCK_STORE`, without a password, and not only a timeout. A permanent error is
 * reported at once, a retryable one within the limit.
 *
 * @param {string} url
 * @param {{ retryable: boolean, tls?: import('../../index.js').TlsOptions, why: RegExp }} expected
 */
export async function assertConnectFails(url, { retryable, tls, why }) {
  const storeTimeoutMs = retryable ? RETRYABLE_LIMIT_MS : PERMANENT_LIMIT_MS
  const attempt = async () => {
    const [elapsedMs, stalledMs] = [stopwatch(), stallwatch()]
    const error = await rejection(LockService.connect(url, { storeTimeoutMs, ...(tls && { tls }) }))
    return { error, tookMs: elapsedMs(), stalledMs: stalledMs() }
  }
  let { error, tookMs, stalledMs } = await attempt()
  // On a machine that stands still the time may pass before the cause is known.
  for (let repeats = 0; repeats < 4 && stalledMs > 250 && !why.test(error.message); repeats++) {
    ;({ error, tookMs, stalledMs } = await attempt())
  }
  assertLockError(error, 'LOCK_STORE', { engine: 'mongodb' })
  assert.match(error.message, why)
  assert.equal(error.retryable, retryable, error.message)
  assert.doesNotMatch(`${error.stack} ${error.cause?.stack} ${JSON.stringify(error)}`, new RegExp(SECRET))
  assert.doesNotMatch(error.message, /labels|Topology|no answer within/, 'no debug text of the driver')
  assert.ok(tookMs < (retryable ? RETRYABLE_LIMIT_MS + 1000 : PERMANENT_LIMIT_MS / 2), `${tookMs} ms`)
  return error
}
