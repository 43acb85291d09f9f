// The contract on a quorum of three Redis nodes, and nodes that fail.
import assert from 'node:assert/strict'
import { describe, it } from 'node:test'
import { LockService } from '../index.js'
import { locateRedis, startRedis } from '../scripts/servers.mjs'
import { contract } from './contract.mjs'
import { canStartServer } from './stores.mjs'
import { rejects, until } from './tools.mjs'

contract('redis-quorum')

const TIMEOUT_MS = 90_000

describe('redis-quorum: nodes that fail', { concurrency: 2 }, () => {
  for (const size of [3, 5]) {
    const test = (title, body) =>
      it(`${title}, of ${size}`, { timeout: TIMEOUT_MS }, async (t) => {
        if (!(await canStartServer(t, 'redis-quorum', locateRedis))) return
        const nodes = await Promise.all(Array.from({ length: size }, () => startRedis()))
        const locks = await LockService.connect(
          nodes.map((node) => node.url),
          { storeTimeoutMs: 4000 },
        )
        try {
          await body(locks, nodes)
        } finally {
          await locks.close()
          await Promise.all(nodes.map((node) => node.stop()))
        }
      })

    test('a renewed lock survives the restart of every node, a minority at a time', async (locks, nodes) => {
      const few = Math.floor(size / 2)
      const lock = await locks.acquire('n', { ttlMs: 6000, metadata: 'm' })
      // Each node restarts once, and has lost its data.
      for (let first = 0; first < size; first += few) {
        const stopped = nodes.slice(first, first + few)
        await Promise.all(stopped.map((node) => node.kill()))
        const renewed = lock.remainingMs
        await until('a renewal', () => lock.remainingMs > renewed || lock.signal.aborted)
        assert.equal(await locks.tryAcquire('n'), null)
        await Promise.all(stopped.map((node) => node.restart()))
        await until('healing', async () => {
          const held = await Promise.all(
            stopped.map((node) =>
              LockService.connect(node.url).then(async (alone) => {
                const info = await alone.inspect('n')
                await alone.close()
                return info !== null
              }),
            ),
          )
          return held.every(Boolean)
        })
      }
      assert.equal(lock.signal.aborted, false)
      assert.equal((await locks.inspect('n')).fencingToken, lock.fencingToken)
      assert.equal(await lock.release(), true)
      const next = await locks.acquire('n')
      assert.ok(next.fencingToken > lock.fencingToken)
      await next.release()
    })

    test('calls without a majority reject within the limit, and succeed again afterwards', async (locks, nodes) => {
      const most = nodes.slice(0, Math.floor(size / 2) + 1)
      const lock = await locks.acquire('n', { ttlMs: 60_000 })
      await lock.release()
      await Promise.all(most.map((node) => node.kill()))
      const started = performance.now()
      const error = await rejects(locks.tryAcquire('n'), 'LOCK_STORE', { retryable: true, engine: 'redis' })
      assert.ok(performance.now() - started < 20_000)
      assert.match(error.message, new RegExp(`${size - most.length} of ${size} answered`))
      await Promise.all(most.map((node) => node.restart()))
      const again = await locks.acquire('n', { waitMs: 60_000 })
      assert.ok(again.fencingToken > lock.fencingToken)
      await again.release()
    })

    test('a waiter is woken by the remaining nodes', async (locks, nodes) => {
      const lock = await locks.acquire('n')
      const wait = locks.acquire('n', { waitMs: 60_000 })
      await until('the waiter', () => locks.stats().waiting === 1)
      await Promise.all(nodes.slice(0, Math.floor(size / 2)).map((node) => node.kill()))
      assert.equal(await lock.release(), true)
      const next = await wait
      assert.ok(next.fencingToken > lock.fencingToken)
      await next.release()
    })
  }
})
