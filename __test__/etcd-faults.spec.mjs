// A server of etcd that is full, that compacts its history, and names with thousands of entries.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { LockService } from '../index.js'
import { etcdctl, locateEtcd, startEtcd } from '../scripts/etcd.mjs'
import { EtcdClient } from './etcd-client.mjs'
import { random, skip } from './stores.mjs'
import { inspectHeld, rejects, sleep, until, waiting } from './tools.mjs'

describe('etcd: faults of the server', { timeout: 300_000 }, () => {
  let reason = ''
  /** @type {Awaited<ReturnType<typeof startEtcd>>} */
  let server
  before(async () => {
    await locateEtcd().catch((error) => (reason = error.message))
    if (!reason) server = await startEtcd({ args: ['--quota-backend-bytes', String(16 << 20)] })
  })
  after(() => server?.stop())
  const test = (title, body) =>
    it(title, { timeout: 120_000 }, async (t) => {
      if (reason) return skip(t, reason)
      const services = []
      const keyPrefix = `test/${random()}/`
      const connect = async (options) => {
        services.push(await LockService.connect(server.url, { keyPrefix, ...options }))
        return services.at(-1)
      }
      try {
        await body(connect, new EtcdClient(server.url), keyPrefix)
        for (const service of services) assert.equal(service.stats().lost, 0)
      } finally {
        await Promise.all(services.map((service) => service.close()))
      }
    })

  test('a lock is renewed and released while the history is compacted, and a waiter is served', async (connect, client) => {
    const [a, b] = [await connect(), await connect()]
    const held = await a.acquire('n', { ttlMs: 5000 })
    const wait = b.acquire('n', { waitMs: 60_000 })
    await waiting(b, 1)
    for (let round = 0; round < 12; round++) {
      for (let write = 0; write < 50; write++) await client.put(`other/${round}/${write}`, 'x'.repeat(100), 0)
      const { header } = await client.call('kv/range', { key: 'AA==' })
      await client.call('kv/compaction', { revision: header.revision, physical: true })
      await sleep(500)
    }
    assert.ok(held.isHeld)
    assert.equal(await held.release(), true)
    const next = await wait
    assert.ok(next.fencingToken > held.fencingToken)
    assert.equal(await next.release(), true)
  })

  test('a name with 10000 entries has one holder, and a waiter behind all of them', async (connect, client, keyPrefix) => {
    const [a, b] = [await connect(), await connect()]
    const held = await a.acquire('n', { ttlMs: 60_000 })
    for (let entry = 0; entry < 10_000; entry += 100) {
      const puts = Array.from({ length: 100 }, (_, index) => ({
        request_put: { key: Buffer.from(`${keyPrefix}n/other-${entry + index}`).toString('base64'), value: '' },
      }))
      await client.call('kv/txn', { success: puts })
    }
    let isGranted = false
    const wait = b.acquire('n', { waitMs: 100_000 }).finally(() => (isGranted = true))
    await until('the waiter', async () => (await a.inspect('n'))?.waiting === 10_001, 30_000)
    assert.equal((await a.list())[0].waiting, 10_001)
    await held.extend(90_000)
    assert.equal(await held.release(), true)
    assert.equal(await a.tryAcquire('n'), null)
    assert.equal(isGranted, false)
    await client.delete(`${keyPrefix}n/other-`, `${keyPrefix}n/other.`)
    const next = await wait
    assert.ok(next.fencingToken > held.fencingToken)
    assert.equal((await inspectHeld(a, 'n')).waiting, 0)
    assert.equal(await next.release(), true)
  })

  test('3000 waiters of two services are served one after the other', async (connect) => {
    // A service enters waiters of a name one after the other, each with a commit.
    const slow = { storeTimeoutMs: 60_000 }
    const [a, b] = [await connect(slow), await connect(slow)]
    const held = await a.acquire('n', { ttlMs: 60_000 })
    let [inside, last] = [0, held.fencingToken]
    const waits = Array.from({ length: 3000 }, (_, index) =>
      (index % 2 ? a : b).using('n', { waitMs: 100_000 }, (lock) => {
        assert.equal(++inside, 1)
        assert.ok(lock.fencingToken > last)
        last = lock.fencingToken
        inside--
      }),
    )
    await until('the waiters', async () => (await a.inspect('n'))?.waiting === 3000, 60_000)
    assert.equal(await held.release(), true)
    await Promise.all(waits)
    assert.equal(await a.inspect('n'), null)
  })

  test('a full server renews, and says what to do about new locks and releases', async (connect, client) => {
    const locks = await connect({ storeTimeoutMs: 2000 })
    const held = await locks.acquire('held', { ttlMs: 6000 })
    const value = 'x'.repeat(1 << 20)
    for (let index = 0; ; index++)
      if (await client.put(`full/${index}`, value, 0).catch(() => true)) if (index > 20) break
    await until('the alarm', async () => (await etcdctl(server, 'alarm', 'list')).includes('NOSPACE'))
    const error = await rejects(locks.tryAcquire('new'), 'LOCK_STORE', { retryable: true })
    assert.match(error.message, /space exceeded.*etcdctl alarm disarm/)
    await sleep(7000)
    assert.ok(held.isHeld, 'renewals write nothing')
    // A server that is full refuses transactions; one that has the alarm, and some space, only those that write.
    await held.release().catch((error) => assert.match(error.message, /space exceeded/))
    await etcdctl(server, 'del', '--prefix', 'full/')
    const { header } = await client.call('kv/range', { key: 'AA==' })
    await client.call('kv/compaction', { revision: header.revision, physical: true })
    await etcdctl(server, 'defrag')
    await etcdctl(server, 'alarm', 'disarm')
    let again
    while (!again) again = await locks.tryAcquire('new').catch(() => null)
    assert.ok(again.fencingToken > held.fencingToken)
    assert.equal(await again.release(), true)
  })
})
