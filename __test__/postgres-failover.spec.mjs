// Several servers of PostgreSQL: a standby that is promoted, a standby that cannot write, a server that is silent, and a pooler
// that only the listening connection bypasses.
import assert from 'node:assert/strict'
import net from 'node:net'
import { after, before, describe, it } from 'node:test'
import { locatePgBouncer, locatePostgres, startPgBouncer } from '../scripts/postgres.mjs'
import { freePort } from '../scripts/servers.mjs'
import { LockService } from '../index.js'
import { postgres } from './drivers/postgres.mjs'
import { query, set, startPair, urlOf } from './postgres-replication.mjs'
import { promotion } from './suites/promotion.mjs'
import { canStartServer } from './stores.mjs'
import { later, median, rejects, sleep, until, waiting } from './tools.mjs'

promotion(postgres)

/** Returns a function that connects services, and one that closes them. */
function services() {
  const connected = []
  const connect = async (url, options) => {
    const service = await LockService.connect(url, { storeTimeoutMs: 4000, ...options })
    connected.push(service)
    return service
  }
  return { connect, closeAll: () => Promise.all(connected.splice(0).map((service) => service.close())) }
}

describe('postgres: several servers', { concurrency: 1 }, () => {
  const { connect, closeAll } = services()
  after(closeAll)
  const test = (name, body) =>
    it(name, { timeout: 90_000 }, async (t) => {
      if (await canStartServer(t, 'postgres', locatePostgres)) await body(t)
    })

  test('the server that accepts writes is used, whatever its place in the list; without one, each server is named', async (t) => {
    const { primary, replica: standby, stop } = await startPair()
    t.after(async () => {
      standby.resume()
      await closeAll()
      await stop()
    })
    const locks = await connect(urlOf(standby, primary))
    assert.equal(await locks.using('n', (lock) => lock.isHeld), true)
    // The address of a standby alone, such as that of a read replica, would answer with old rows.
    const alone = await rejects(connect(urlOf(standby)), 'LOCK_STORE', { retryable: true })
    assert.match(alone.message, postgres.errors.readOnly)
    // Commits would wait for the paused standby.
    await set(primary, 'synchronous_commit', 'local')
    await standby.pause()
    const again = await connect(urlOf(standby, primary))
    assert.equal(await again.using('n', (lock) => lock.isHeld), true)
    standby.resume()

    await primary.kill()
    const error = await rejects(connect(urlOf(primary, standby)), 'LOCK_STORE', { retryable: true })
    assert.ok(error.message.includes(`127.0.0.1:${primary.port}`), error.message)
    const readOnly =
      'the server does not allow writes (it is a standby, or default_transaction_read_only is on: the URL must lead to the primary, or ' +
      'have both hosts)'
    assert.ok(error.message.includes(`${readOnly} (127.0.0.1:${standby.port})`), error.message)
  })
})

describe('postgres: poolers', { concurrency: 1 }, () => {
  const { connect, closeAll } = services()
  const skipped = []
  /** @type {Awaited<ReturnType<typeof startPgBouncer>>} */
  let pooler
  before(async () => {
    const can = { skip: (reason) => skipped.push(reason) }
    if (!(await canStartServer(can, 'postgres', locatePostgres))) return
    if (await canStartServer(can, 'postgres', locatePgBouncer)) pooler = await startPgBouncer()
  })
  after(async () => {
    await closeAll()
    await pooler?.stop()
  })
  const test = (name, body) => it(name, { timeout: 60_000 }, (t) => (pooler ? body(t) : t.skip(skipped[0])))

  test('a pooler that ignores the options of a session is detected', async (t) => {
    const pooler = await startPgBouncer({ ignore_startup_parameters: 'options' })
    t.after(async () => {
      await closeAll()
      await pooler.stop()
    })
    const [holder, other] = [await connect(pooler.url), await connect(pooler.url)]
    // A service that waits for notifications would need 2 s for each.
    for (let i = 0; i < 60; i++) {
      const lock = await holder.acquire('n')
      const waiter = later(other.acquire('n', { waitMs: 30_000 }))
      await waiting(other, 1)
      assert.equal(await lock.release(), true)
      assert.equal(await (await waiter).release(), true)
    }
  })

  test('listenUrl bypasses a pooler: a waiter is notified', async () => {
    const listening = () =>
      query(
        pooler.server,
        "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN \"holdfast_%' AND client_addr IS NOT NULL",
      )
    const pooled = `${pooler.url}?pooler=transaction`
    for (const listenUrl of [undefined, pooler.server.url]) {
      const [holder, other] = [await connect(pooled, { listenUrl }), await connect(pooled, { listenUrl })]
      const tookMs = []
      for (let i = 0; i < 7; i++) {
        const lock = await holder.acquire('n')
        const waiter = later(other.acquire('n', { waitMs: 30_000 }))
        await waiting(other, 1)
        if (listenUrl) await until('a connection listens', async () => (await listening()).length === 1)
        else if (i === 0) {
          await sleep(500)
          assert.equal((await listening()).length, 0)
        }
        const releasedAt = performance.now()
        assert.equal(await lock.release(), true)
        const next = await waiter
        tookMs.push(performance.now() - releasedAt)
        assert.equal(await next.release(), true)
      }
      // Without notifications a waiter would find its grant with the heartbeat, every 2 s. The machine may stall: the median counts.
      assert.ok(median(tookMs) < 1000, `${tookMs} ms`)
      await closeAll()
    }
  })

  test('a listenUrl that cannot be reached emits a warning, and waiters are served', async () => {
    const warned = new Promise((resolve) => process.once('warning', resolve))
    const listenUrl = `postgres://127.0.0.1:${await freePort()}`
    const [holder, other] = [await connect(pooler.server.url), await connect(pooler.server.url, { listenUrl })]
    const lock = await holder.acquire('n')
    const waiter = later(other.acquire('n', { waitMs: 30_000 }))
    const warning = /** @type {any} */ (await warned)
    assert.deepEqual([warning.name, warning.code], ['HoldfastWarning', 'HOLDFAST_STORE'])
    assert.match(warning.message, /notifications.*cannot be opened.*up to 2 s late.*refused.*listenUrl/)
    assert.equal(await lock.release(), true)
    assert.equal(await (await waiter).release(), true)
  })

  test('a pooler without a free connection is tried again', async (t) => {
    let isFull = true
    const text = ['SFATAL', 'CXX000', 'M(EMAXCONNSESSION) max clients reached in session mode', ''].join('\0') + '\0'
    const refusal = Buffer.alloc(5 + text.length)
    refusal.write('E')
    refusal.writeInt32BE(4 + text.length, 1)
    refusal.write(text, 5)
    const fullPooler = net.createServer((client) => {
      client.on('error', () => {})
      // The URL asks for no TLS, so the first packet is the login.
      if (isFull) return client.once('data', () => client.end(refusal))
      const connection = net.connect(pooler.server.port, '127.0.0.1')
      connection.on('error', () => client.destroy())
      client.pipe(connection).pipe(client)
    })
    await new Promise((resolve) => fullPooler.listen(0, '127.0.0.1', () => resolve(undefined)))
    t.after(async () => {
      await closeAll()
      fullPooler.close()
    })
    const url = urlOf(/** @type {net.AddressInfo} */ (fullPooler.address()))
    const error = await rejects(connect(url), 'LOCK_STORE', { retryable: true })
    assert.match(error.message, /EMAXCONNSESSION/)
    setTimeout(() => (isFull = false), 1500)
    const locks = await connect(url, { connectMs: 20_000 })
    assert.equal(await locks.using('n', (lock) => lock.isHeld), true)
    const backends = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holdfast'"
    isFull = true
    await query(pooler.server, backends)
    setTimeout(() => (isFull = false), 1500)
    const lock = await locks.acquire('n', { waitMs: 20_000, onStoreError: 'wait' })
    assert.equal(await lock.release(), true)
  })
})
