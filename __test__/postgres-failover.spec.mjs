// Several servers of PostgreSQL: a standby that is promoted, a standby that cannot write, a server that is silent, and a pooler
// that only the listening connection bypasses.
import assert from 'node:assert/strict'
import net from 'node:net'
import { after, describe, it } from 'node:test'
import { locatePgBouncer, locatePostgres, startPgBouncer, startPostgres } from '../scripts/postgres.mjs'
import { freePort } from '../scripts/servers.mjs'
import { LockService } from '../index.js'
import { withPostgres } from './postgres-client.mjs'
import { canStartServer } from './stores.mjs'
import { later, median, rejects, sleep, until, waiting } from './tools.mjs'

const urlOf = (...servers) =>
  `postgres://holdfast@${servers.map(({ port }) => `127.0.0.1:${port}`).join(',')}/postgres?sslmode=disable`
const query = (server, text) => withPostgres(server.url, async (client) => (await client.query(text)).rows)

/** Starts a primary and its synchronous standby: a commit waits for both. */
async function startPair() {
  const primary = await startPostgres({ settings: { synchronous_standby_names: "'*'", synchronous_commit: 'local' } })
  try {
    const standby = await startPostgres({ standbyOf: primary, settings: { synchronous_standby_names: "''" } })
    await until('the standby is synchronous', async () => {
      const rows = await query(primary, 'SELECT sync_state FROM pg_stat_replication')
      return rows.some(({ sync_state }) => sync_state === 'sync')
    })
    await query(primary, "ALTER SYSTEM SET synchronous_commit = 'remote_apply'")
    await query(primary, 'SELECT pg_reload_conf()')
    await until(
      'commits wait',
      async () => (await query(primary, 'SHOW synchronous_commit'))[0].synchronous_commit !== 'local',
    )
    return { primary, standby, stop: () => Promise.all([primary.stop(), standby.stop()]) }
  } catch (error) {
    await primary.stop()
    throw error
  }
}

describe('postgres: several servers', { concurrency: 1 }, () => {
  const services = []
  const connect = async (url, options) => {
    const service = await LockService.connect(url, { storeTimeoutMs: 4000, ...options })
    services.push(service)
    return service
  }
  const closeAll = () => Promise.all(services.splice(0).map((service) => service.close()))
  after(closeAll)
  const test = (name, body) =>
    it(name, { timeout: 90_000 }, async (t) => {
      if (await canStartServer(t, 'postgres', locatePostgres)) await body(t)
    })

  test('a standby is promoted: locks stay held, waiters are served, tokens grow', async (t) => {
    const { primary, standby, stop } = await startPair()
    t.after(async () => {
      await closeAll()
      await stop()
    })
    const url = urlOf(primary, standby)
    const [holder, other] = [await connect(url), await connect(url)]
    const renewed = await holder.acquire('renewed', { ttlMs: 12_000 })
    const several = await holder.acquire(['one', 'two'], { ttlMs: 60_000, renew: false })
    const waiter = later(other.acquire('two', { waitMs: 60_000, onStoreError: 'wait' }))
    await waiting(other, 1)
    const startedAt = performance.now()
    await primary.kill()
    await query(standby, 'SELECT pg_promote()')
    await until('the new primary is used', () => other.inspect('one').catch(() => null), 20_000)
    for (const lock of [renewed, several]) {
      assert.equal(lock.isHeld, true)
      for (const name of lock.names) {
        assert.equal((await other.inspect(name))?.fencingToken, lock.fencingToken)
        assert.equal(await other.tryAcquire(name), null)
      }
    }
    await until('the first ttl has passed', () => performance.now() > startedAt + 12_500, 20_000)
    assert.equal(renewed.isHeld, true)
    assert.equal(holder.stats().lost, 0)
    assert.equal(await several.release(), true)
    const next = await waiter
    assert.ok(next.fencingToken > several.fencingToken)
    assert.equal(await next.release(), true)
    assert.equal(await renewed.release(), true)
  })

  test('the server that accepts writes is used, whatever its place in the list', async (t) => {
    const { primary, standby, stop } = await startPair()
    t.after(async () => {
      standby.resume()
      await closeAll()
      await stop()
    })
    const locks = await connect(urlOf(standby, primary))
    assert.equal(await locks.using('n', (lock) => lock.isHeld), true)
    // The address of a standby alone, such as that of a read replica, would answer with old rows.
    const error = await rejects(connect(urlOf(standby)), 'LOCK_STORE', { retryable: true })
    assert.match(error.message, /does not allow writes \(it is a standby.*must lead to the primary/)
    // Commits would wait for the paused standby.
    await query(primary, "ALTER SYSTEM SET synchronous_commit = 'local'")
    await query(primary, 'SELECT pg_reload_conf()')
    await until(
      'commits do not wait',
      async () => (await query(primary, 'SHOW synchronous_commit'))[0].synchronous_commit === 'local',
    )
    await standby.pause()
    const again = await connect(urlOf(standby, primary))
    assert.equal(await again.using('n', (lock) => lock.isHeld), true)
  })

  test('no server accepts writes: each one is named', async (t) => {
    const { primary, standby, stop } = await startPair()
    t.after(stop)
    await primary.kill()
    const error = await rejects(connect(urlOf(primary, standby)), 'LOCK_STORE', { retryable: true })
    assert.ok(error.message.includes(`127.0.0.1:${primary.port}`), error.message)
    const readOnly =
      'the server does not allow writes (it is a standby, or default_transaction_read_only is on: the URL must lead to the primary, or ' +
      'have both hosts)'
    assert.ok(error.message.includes(`${readOnly} (127.0.0.1:${standby.port})`), error.message)
  })

  it('a pooler that ignores the options of a session is detected', { timeout: 60_000 }, async (t) => {
    if (!(await canStartServer(t, 'postgres', locatePostgres))) return
    if (!(await canStartServer(t, 'postgres', locatePgBouncer))) return
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

  it('listenUrl bypasses a pooler: a waiter is notified', { timeout: 60_000 }, async (t) => {
    if (!(await canStartServer(t, 'postgres', locatePostgres))) return
    if (!(await canStartServer(t, 'postgres', locatePgBouncer))) return
    const pooler = await startPgBouncer()
    t.after(async () => {
      await closeAll()
      await pooler.stop()
    })
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

  it('a listenUrl that cannot be reached emits a warning, and waiters are served', { timeout: 60_000 }, async (t) => {
    if (!(await canStartServer(t, 'postgres', locatePostgres))) return
    const server = await startPostgres()
    t.after(async () => {
      await closeAll()
      await server.stop()
    })
    const warned = new Promise((resolve) => process.once('warning', resolve))
    const listenUrl = `postgres://127.0.0.1:${await freePort()}`
    const [holder, other] = [await connect(server.url), await connect(server.url, { listenUrl })]
    const lock = await holder.acquire('n')
    const waiter = later(other.acquire('n', { waitMs: 30_000 }))
    const warning = /** @type {any} */ (await warned)
    assert.deepEqual([warning.name, warning.code], ['HoldfastWarning', 'HOLDFAST_STORE'])
    assert.match(warning.message, /notifications.*cannot be opened.*up to 2 s late.*refused.*listenUrl/)
    assert.equal(await lock.release(), true)
    assert.equal(await (await waiter).release(), true)
  })

  test('a pooler without a free connection is tried again', async (t) => {
    const server = await startPostgres()
    let isFull = true
    const text = ['SFATAL', 'CXX000', 'M(EMAXCONNSESSION) max clients reached in session mode', ''].join('\0') + '\0'
    const full = Buffer.alloc(5 + text.length)
    full.write('E')
    full.writeInt32BE(4 + text.length, 1)
    full.write(text, 5)
    const pooler = net.createServer((client) => {
      client.on('error', () => {})
      // The URL asks for no TLS, so the first packet is the login.
      if (isFull) return client.once('data', () => client.end(full))
      const connection = net.connect(server.port, '127.0.0.1')
      connection.on('error', () => client.destroy())
      client.pipe(connection).pipe(client)
    })
    await new Promise((resolve) => pooler.listen(0, '127.0.0.1', () => resolve(undefined)))
    t.after(async () => {
      await closeAll()
      pooler.close()
      await server.stop()
    })
    const url = urlOf(/** @type {net.AddressInfo} */ (pooler.address()))
    const error = await rejects(connect(url), 'LOCK_STORE', { retryable: true })
    assert.match(error.message, /EMAXCONNSESSION/)
    setTimeout(() => (isFull = false), 1500)
    const locks = await connect(url, { connectMs: 20_000 })
    assert.equal(await locks.using('n', (lock) => lock.isHeld), true)
    const backends = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holdfast'"
    isFull = true
    await query(server, backends)
    setTimeout(() => (isFull = false), 1500)
    const lock = await locks.acquire('n', { waitMs: 20_000, onStoreError: 'wait' })
    assert.equal(await lock.release(), true)
  })
})
