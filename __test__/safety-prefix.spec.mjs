// withPrefix: a view of a service with a prefix of names. ping: a round trip to the store.
import assert from 'node:assert/strict'
import { LockService } from '../index.js'
import { assertFree, rejection, rejects, until } from './tools.mjs'
import { locateRedis, startRedis } from '../scripts/servers.mjs'
import { canStartServer, KINDS, suite } from './stores.mjs'

for (const kind of Object.keys(KINDS)) {
  suite(kind, 'a view', (test) => {
    test('its names begin with the prefix in the store, and have none in results', async (store) => {
      const seen = []
      const a = await store.connect({ onEvent: (event) => seen.push(event) })
      const b = await store.connect()
      const view = a.withPrefix('billing:')
      assert.ok(view instanceof LockService)
      const lock = await view.acquire(['n', 'm'], { metadata: { why: 'test' } })
      assert.deepEqual([lock.name, lock.names, lock.toJSON().names], ['n', ['n', 'm'], ['n', 'm']])
      assert.deepEqual(
        (await b.list()).map((info) => info.name),
        ['billing:m', 'billing:n'],
      )
      assert.deepEqual(
        (await view.list({ prefix: 'n' })).map((info) => info.name),
        ['n'],
      )
      const outside = await b.acquire('outside')
      assert.deepEqual(
        (await b.withPrefix('billing:').list()).map((info) => info.name),
        ['m', 'n'],
      )
      assert.equal((await view.inspect('n'))?.name, 'n')
      assert.equal(await view.inspect('outside'), null)
      await until('an event', () => seen.length > 0)
      assert.deepEqual([seen[0].name, seen[0].names], ['billing:n', ['billing:n', 'billing:m']])

      const nested = b.withPrefix('bill').withPrefix('ing:')
      const busy = await rejects(nested.acquire(['l', 'm'], { waitMs: 50 }), 'LOCK_TIMEOUT', { key: 'm' })
      assert.match(busy.message, /^the lock "m" was still busy/)
      assert.deepEqual([(await nested.tryUsing('n', () => {})).ran, await nested.tryAcquire('n')], [false, null])
      const theirs = await nested.restore(lock.transferable())
      assert.deepEqual(theirs.names, ['n', 'm'])
      const lost = await rejects(lock.extend(5000), 'LOCK_LOST', { key: 'n' })
      for (const error of [lost, lock.signal.reason]) {
        assert.equal(error.key, 'n')
        assert.match(error.message, /^the lock "n" is lost/)
      }
      assert.equal(await theirs.release(), true)

      assert.equal(await view.acquireLock('gist', 60), true)
      assert.equal((await b.inspect('billing:gist')).name, 'billing:gist')
      assert.equal(await view.releaseLock('gist'), true)
      assert.equal(await view.acquireAndExecute('execute', () => b.tryAcquire('billing:execute')), null)
      const gone = await rejection(view.using('forced', () => b.forceRelease('billing:forced')))
      assert.deepEqual([gone.code, gone.key], ['LOCK_LOST', 'forced'])
      assert.match(gone.message, /"forced"/)
      await view.using('own', async () => assert.equal(await nested.forceRelease('own'), true)).catch(() => {})
      assert.deepEqual(view.stats(), a.stats())
      const { acquire } = view
      await (await acquire('detached')).release()
      await outside.release()
      await assertFree(a, 'billing:n')
      await view.close()
      await rejects(a.acquire('n'), 'LOCK_CLOSED')
    })

    test('a name and its prefix are checked', async (store) => {
      const a = await store.connect()
      const view = a.withPrefix('x'.repeat(500))
      await rejects(view.acquire(''), 'LOCK_INVALID_ARGUMENT')
      await rejects(view.acquire(['n', '']), 'LOCK_INVALID_ARGUMENT')
      await rejects(view.inspect(''), 'LOCK_INVALID_ARGUMENT')
      await (await view.acquire('n'.repeat(12))).release()
      await rejects(view.acquire('n'.repeat(13)), 'LOCK_INVALID_ARGUMENT')
      for (const prefix of /** @type {any[]} */ ([undefined, null, 5, {}, '\ud800'])) {
        assert.throws(() => a.withPrefix(prefix), { code: 'LOCK_INVALID_ARGUMENT', message: /^prefix must/ })
      }
      await (await a.withPrefix('').acquire('n')).release()
    })

    test('ping returns the duration of a round trip', async (store) => {
      const a = await store.connect()
      for (const service of [a, a.withPrefix('p:')]) {
        const ms = await service.ping()
        assert.ok(typeof ms === 'number' && ms >= 0 && ms < 5000, `${ms} ms`)
      }
      assert.deepEqual(await a.list(), [])
      await a.close()
      await rejects(a.ping(), 'LOCK_CLOSED')
    })
  })
}

suite('redis', 'ping', (test) => {
  test('it rejects when the server is down', async (_, t) => {
    if (!(await canStartServer(t, 'redis', locateRedis))) return
    const server = await startRedis()
    const locks = await LockService.connect(server.url, { storeTimeoutMs: 1500 })
    assert.ok((await locks.ping()) >= 0)
    await server.stop()
    await rejects(locks.ping(), 'LOCK_STORE', { engine: 'redis', retryable: true })
    await locks.close()
  })
})
