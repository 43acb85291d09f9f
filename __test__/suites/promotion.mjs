// A primary and its replica, which is promoted when the primary is lost or accepts no writes.
import assert from 'node:assert/strict'
import { describe, it } from 'node:test'
import { LockService } from '../../index.js'
import { SLACK_MS } from '../proxy.mjs'
import { canStartServer } from '../stores.mjs'
import { later, rejects, stopwatch, until, waiting } from '../tools.mjs'

const STORE_TIMEOUT_MS = 4000

/** Declares the suite. `driver` starts the pair of servers; see `drivers/postgres.mjs`. */
export function promotion(driver) {
  describe(`${driver.kind}: promotion of a replica`, { concurrency: 1 }, () => {
    /** Declares a test with a pair of servers, and a function that connects services to it. */
    const test = (name, options, body) =>
      it(name, { timeout: 120_000 }, async (t) => {
        if (!(await canStartServer(t, driver.kind, driver.locate))) return
        const pair = await driver.startPair(options)
        const services = []
        try {
          await body(pair, async () => {
            services.push(
              await LockService.connect(pair.url(), { storeTimeoutMs: STORE_TIMEOUT_MS, connectMs: 20_000 }),
            )
            return services.at(-1)
          })
        } finally {
          await Promise.all(services.map((service) => service.close()))
          await pair.stop()
        }
      })

    test('the primary is lost: locks stay held, waiters are served, tokens grow', {}, async (pair, connect) => {
      const [holder, other] = [await connect(), await connect()]
      const renewed = await holder.acquire('renewed', { ttlMs: 12_000 })
      const several = await holder.acquire(['one', 'two'], { ttlMs: 90_000, renew: false })
      const waiter = later(other.acquire('two', { waitMs: 90_000, onStoreError: 'wait' }))
      await waiting(other, 1)
      const [startedAt, elapsedMs] = [performance.now(), stopwatch()]
      await pair.lose()
      // Until the promotion, calls reject in time, and say why.
      const calls = [holder.tryAcquire('free'), holder.acquire(['two', 'names']), holder.forceRelease('one')]
      for (const call of calls.map(later))
        assert.match((await rejects(call, 'LOCK_STORE', { retryable: true })).message, driver.errors.readOnly)
      const tookMs = elapsedMs()
      assert.ok(tookMs < STORE_TIMEOUT_MS + SLACK_MS, `${tookMs} ms`)
      if (driver.replicaReads) assert.equal((await other.inspect('one'))?.fencingToken, several.fencingToken)

      await pair.promote()
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

    test('the primary accepts no writes: open connections to it are not used any more', {}, async (pair, connect) => {
      const [writer, reader, other] = [await connect(), await connect(), await connect()]
      const held = await writer.acquire('held', { ttlMs: 60_000 })
      assert.equal((await reader.inspect('held'))?.fencingToken, held.fencingToken)
      const waiter = later(other.acquire('held', { waitMs: 90_000, onStoreError: 'wait' }))
      await waiting(other, 1)
      await pair.refuseWrites()
      await pair.promote()
      // Each call succeeds, although its connection has to be replaced.
      const first = await writer.acquire('new')
      const listed = await reader.list()
      if (driver.readsFollow)
        assert.deepEqual(listed.map(({ name }) => name).sort(), ['held', 'new'], 'not what the old primary has')
      await held.extend('60s')
      assert.equal(await held.release(), true)
      const served = await waiter
      assert.ok(served.fencingToken > held.fencingToken)
      assert.equal(await driver.has(pair.primary, 'new'), false)
      assert.equal(await served.release(), true)
      assert.equal(await first.release(), true)
    })

    test(
      'grants that the replica has not received: the later one has the larger token',
      { isSynchronous: false },
      async (pair, connect) => {
        const [holder, other] = [await connect(), await connect()]
        await holder.using('n', () => {})
        await holder.acquire('later')
        await until('the replica has the name', () => driver.has(pair.replica, 'later').catch(() => false))
        await pair.detach()
        const lost = await holder.acquire('n', { ttlMs: 60_000, renew: false })
        await pair.lose()
        await pair.promote()
        const second = await until('the new primary is used', () => other.tryAcquire('n').catch(() => null))
        assert.ok(second.fencingToken > lost.fencingToken)
        await lost.release()
        assert.equal((await other.inspect('n'))?.fencingToken, second.fencingToken, 'only the owner releases')
        assert.equal(await second.release(), true)
      },
    )
  })
}
