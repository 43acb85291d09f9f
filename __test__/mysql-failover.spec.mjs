// A primary of MariaDB whose replica is promoted. The services reach both at one address, which leads to the new primary then.
import assert from 'node:assert/strict'
import { describe, it } from 'node:test'
import { locateMariadb } from '../scripts/mysql.mjs'
import { LockService } from '../index.js'
import { promote, query, startPair } from './mysql-replication.mjs'
import { SLACK_MS, startProxy } from './proxy.mjs'
import { canStartServer } from './stores.mjs'
import { later, rejects, until, waiting } from './tools.mjs'

const STORE_TIMEOUT_MS = 2000
const READ_ONLY = /--read-only .*\[1290\] .*the URL must lead to the primary/

describe('mysql: failover', { concurrency: 1 }, () => {
  /** Declares a test with a pair of servers behind a proxy, and services that use the proxy. */
  const test = (name, options, body) =>
    it(name, { timeout: 120_000 }, async (t) => {
      if (!(await canStartServer(t, 'mysql', locateMariadb))) return
      const pair = await startPair(options)
      const proxy = await startProxy(pair.primary.port)
      const services = []
      t.after(async () => {
        await Promise.all(services.map((service) => service.close()))
        await proxy.close()
        await pair.stop()
      })
      const connect = async () => {
        const url = `mysql://app@127.0.0.1:${proxy.port}/holdfast`
        const service = await LockService.connect(url, { storeTimeoutMs: STORE_TIMEOUT_MS })
        services.push(service)
        return service
      }
      await body({ ...pair, proxy, connect })
    })

  test('the primary is killed: locks stay held, waiters are served, tokens grow', {}, async (fixture) => {
    const { primary, replica, proxy, connect } = fixture
    const [holder, other] = [await connect(), await connect()]
    const renewed = await holder.acquire('renewed', { ttlMs: 12_000 })
    const several = await holder.acquire(['one', 'two'], { ttlMs: 90_000, renew: false })
    const waiter = later(other.acquire('two', { waitMs: 90_000, onStoreError: 'wait' }))
    await waiting(other, 1)
    const startedAt = performance.now()
    await primary.kill()
    proxy.target = replica.port
    // Until the promotion, calls reject in time, and say why.
    const calls = [holder.tryAcquire('free'), holder.acquire(['two', 'names']), holder.forceRelease('one')]
    for (const call of calls.map(later)) {
      assert.match((await rejects(call, 'LOCK_STORE', { retryable: true })).message, READ_ONLY)
    }
    const tookMs = performance.now() - startedAt
    assert.ok(tookMs < STORE_TIMEOUT_MS + SLACK_MS, `${tookMs} ms`)
    assert.equal((await other.inspect('one'))?.fencingToken, several.fencingToken, 'a replica answers reads')

    await promote(replica)
    const next = await until('the new primary is used', () => holder.tryAcquire('free').catch(() => null))
    assert.ok(next.fencingToken > several.fencingToken)
    assert.equal(await next.release(), true)
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
    const served = await waiter
    assert.ok(served.fencingToken > several.fencingToken)
    assert.equal(await served.release(), true)
    assert.equal(await renewed.release(), true)
  })

  test('the primary becomes read-only: open connections to it are not used any more', {}, async (fixture) => {
    const { primary, replica, proxy, connect } = fixture
    const [writer, reader, other] = [await connect(), await connect(), await connect()]
    const held = await writer.acquire('held', { ttlMs: 60_000 })
    assert.equal((await reader.inspect('held'))?.fencingToken, held.fencingToken)
    const waiter = later(other.acquire('held', { waitMs: 90_000, onStoreError: 'wait' }))
    await waiting(other, 1)
    await query(primary, 'SET GLOBAL read_only = 1')
    // The open connections still lead to the old primary.
    proxy.target = replica.port
    await promote(replica)
    // Each call succeeds, although its connection has to be replaced.
    const first = await writer.acquire('new')
    const listed = await reader.list()
    assert.deepEqual(listed.map(({ name }) => name).sort(), ['held', 'new'], 'not what the old primary has')
    await held.extend('60s')
    assert.equal(await held.release(), true)
    const served = await waiter
    assert.ok(served.fencingToken > held.fencingToken)
    const rows = await query(primary, "SELECT name FROM holdfast.locks WHERE name = 'new'")
    assert.deepEqual(rows, [])
    assert.equal(await served.release(), true)
    assert.equal(await first.release(), true)
  })

  test(
    'grants that the replica has not received: the later one has the larger token',
    { isSynchronous: false },
    async (fixture) => {
      const { primary, replica, proxy, connect } = fixture
      const [holder, other] = [await connect(), await connect()]
      await holder.using('n', () => {})
      await until(
        'the replica has the name',
        async () => (await query(replica, 'SHOW TABLES FROM holdfast')).length === 2,
      )
      await query(replica, 'STOP SLAVE IO_THREAD')
      const lost = await holder.acquire('n', { ttlMs: 60_000, renew: false })
      await primary.kill()
      proxy.target = replica.port
      await promote(replica)
      const second = await until('the new primary is used', () => other.tryAcquire('n').catch(() => null))
      assert.ok(second.fencingToken > lost.fencingToken)
      await lost.release()
      assert.equal((await other.inspect('n'))?.fencingToken, second.fencingToken, 'only the owner releases')
      assert.equal(await second.release(), true)
    },
  )
})
