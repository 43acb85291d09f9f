// JSON.stringify: nothing secret, and nothing that throws.
import assert from 'node:assert/strict'
import { inspect } from 'node:util'
import { assertFree, rejects, until } from './tools.mjs'
import { suite } from './stores.mjs'

for (const kind of ['memory', 'redis', 'mongodb']) {
  suite(kind, 'JSON', (test) => {
    test('a lock has no owner token in JSON, and transferable() has it', async (store) => {
      const [a, b] = await store.connectAll(2)
      const lock = await a.acquire(['n', 'm'], { ttlMs: 60_000, metadata: { why: 'test' } })
      const { token } = lock
      const logged = JSON.parse(JSON.stringify({ lock })).lock
      assert.deepEqual(
        { ...logged, remainingMs: 0 },
        {
          name: 'n',
          names: ['n', 'm'],
          fencingToken: String(lock.fencingToken),
          isHeld: true,
          remainingMs: 0,
        },
      )
      assert.ok(logged.remainingMs > 30_000)
      for (const text of [JSON.stringify(lock), inspect(lock, { depth: 9, showHidden: true })]) {
        assert.ok(!text.includes(token), text)
      }
      for (const given of [logged, JSON.stringify(lock)]) {
        const { message } = await rejects(b.restore(given), 'LOCK_INVALID_ARGUMENT')
        assert.match(message, /lock\.transferable\(\)/)
        assert.match(message, /toJSON\(\)/)
      }
      const transferable = lock.transferable()
      const fields = { names: ['n', 'm'], token, fencingToken: String(lock.fencingToken), ttlMs: 60_000, renew: true }
      assert.deepEqual(transferable, { ...fields, metadata: { why: 'test' } })
      const theirs = await b.restore(JSON.stringify(transferable))
      assert.equal(theirs.fencingToken, lock.fencingToken)
      assert.equal(await theirs.release(), true)
      assert.deepEqual([lock.toJSON().isHeld, b.stats().released], [lock.isHeld, 1])
    })

    test('events, LockInfo and LockStats have a JSON form', async (store) => {
      const seen = []
      const a = await store.connect({ onEvent: (event) => seen.push(event) })
      const b = await store.connect()
      const lock = await a.acquire('n', { ttlMs: 4500, metadata: { big: 'value' } })
      const fencingToken = String(lock.fencingToken)
      const info = await b.inspect('n')
      assert.equal(typeof info.fencingToken, 'bigint')
      const { name, fencingToken: shown, holder, metadata } = JSON.parse(JSON.stringify(info))
      assert.deepEqual(
        { name, shown, since: holder.since, metadata },
        { name: 'n', shown: fencingToken, since: info.holder.since.toISOString(), metadata: { big: 'value' } },
      )
      assert.equal(JSON.parse(JSON.stringify(await b.list()))[0].fencingToken, fencingToken)
      assert.equal(JSON.parse(JSON.stringify(a.stats())).held, 1)
      await until('a renewal', () => a.stats().renewed > 0)
      await lock.release()
      const lost = await a.acquire('lost', { ttlMs: 200, renew: false })
      await until('five events', () => seen.some((event) => event.type === 'lost'))
      assert.equal(lost.isHeld, false)
      // The lease ends in the store a little later than for its holder.
      await assertFree(b, 'lost')
      for (const event of seen) {
        assert.equal(typeof event.fencingToken, 'bigint')
        const json = JSON.parse(JSON.stringify(event))
        assert.deepEqual({ ...json, fencingToken: event.fencingToken }, { ...event })
        assert.equal(json.fencingToken, String(event.fencingToken))
      }
    })
  })
}
