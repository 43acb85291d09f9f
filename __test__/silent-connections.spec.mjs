// Connections that are silent, while new ones work.
import assert from 'node:assert/strict'
import { describe } from 'node:test'
import { SERVER_KINDS, proxySuite } from './proxy.mjs'
import { sleep, waiting } from './tools.mjs'

/** On these a waiter notices the silence after `storeTimeoutMs`, and on a standalone MongoDB it rejects then. */
const LATE = ['redis', 'redis-tls', 'mongodb']

describe('silent connections', { concurrency: 4 }, () => {
  for (const kind of SERVER_KINDS) {
    proxySuite(kind, 'silent connections', {}, (test) => {
      test('a lease outlasts them, although it is shorter than storeTimeoutMs', async ({ proxy, ...fixture }) => {
        const locks = await fixture.warm({ storeTimeoutMs: 20_000 })
        const lock = await locks.acquire('n', { ttlMs: 12_000 })
        proxy.blackhole()
        await sleep(15_000)
        assert.equal(lock.isHeld, true)
        assert.equal(await lock.release(), true)
      })

      const served = 'a waiter is served, although the name was released while its connections were silent'
      test(served, async ({ proxy, direct, ...fixture }, t) => {
        if (LATE.includes(kind)) return t.skip('the waiter notices the silence after storeTimeoutMs')
        const locks = await fixture.warm({ storeTimeoutMs: 20_000 })
        const held = await direct.acquire('n', { ttlMs: 60_000 })
        const waiter = locks.acquire('n', { waitMs: 60_000, ttlMs: 60_000 })
        await waiting(locks, 1)
        await sleep(500)
        proxy.blackhole()
        assert.equal(await held.release(), true)
        const lock = await waiter
        assert.equal(await lock.release(), true)
      })
    })
  }
})
