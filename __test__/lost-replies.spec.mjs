// Lost answers, late answers, and connections that break: no lock that nobody knows of, no lease lost without need.
import assert from 'node:assert/strict'
import { SERVERS, SLACK_MS, proxySuite } from './proxy.mjs'
import { rejection, rejects, sleep, until } from './tools.mjs'

/** The ways to take a lock that make one try, and what they say when they got it. */
const WAYS = {
  acquire: (locks, name, options) => locks.acquire(name, { ttlMs: 60_000, ...options }),
  'acquire of two names': (locks, name, options) => locks.acquire([name, `${name}:2`], { ttlMs: 60_000, ...options }),
  tryAcquire: (locks, name, options) => locks.tryAcquire(name, { ttlMs: 60_000, ...options }),
  acquireLock: (locks, name) => locks.acquireLock(name, 60),
}

const isHeld = async (direct, name) => (await direct.inspect(name)) !== null
const heldAtStore = (direct, name) => until(`${name} held at the store`, () => isHeld(direct, name))
/** Long before its lease would end. */
const givenBack = (direct, name) => until(`${name} given back`, async () => !(await isHeld(direct, name)), 20_000)

for (const kind of Object.keys(SERVERS)) {
  proxySuite(kind, 'answers that are lost or late', {}, (test) => {
    for (const [way, take] of Object.entries(WAYS)) {
      test(`an answer to ${way} is lost: the call gets the lock all the same`, async ({ proxy, direct, ...fixture }) => {
        const locks = await fixture.warm()
        // Some stores take more than one step: each of their answers gets lost in turn.
        let step = 0
        for (; ; step++) {
          const name = `name-${step}`
          const lost = proxy.loseReply(fixture.key(name), step)
          const call = take(locks, name)
          if (!(await Promise.race([lost, call.then(() => false)]))) break
          assert.equal(await isHeld(direct, name), true)
          proxy.cut()
          const lock = await call
          const { fencingToken } = await direct.inspect(name)
          assert.equal(typeof fencingToken, 'bigint')
          if (way === 'acquireLock') {
            assert.equal(lock, true)
            assert.equal(await locks.releaseLock(name), true)
          } else {
            assert.equal(lock.fencingToken, fencingToken)
            assert.equal(lock.isHeld, true)
            assert.equal(await lock.release(), true)
          }
          assert.equal(await isHeld(direct, name), false)
        }
        proxy.disarm()
        assert.ok(step > 0, 'no answer was lost')
        await locks.close()
        assert.equal(locks.stats().lost, 0)
      })

      test(`the answer to ${way} is lost, and the store stays away: nothing is left`, async ({ proxy, direct, ...fixture }) => {
        const locks = await fixture.warm({ storeTimeoutMs: 3000 })
        const lost = proxy.loseReply(fixture.key('name'))
        const call = rejects(take(locks, 'name'), 'LOCK_STORE', { retryable: true, engine: SERVERS[kind].engine })
        await lost
        await proxy.down()
        await call
        assert.equal(await isHeld(direct, 'name'), true)
        await proxy.up()
        await givenBack(direct, 'name')
        await givenBack(direct, 'name:2')
      })

      test(`the answer to ${way} comes after the store's time is over: nothing is left`, async ({ proxy, direct, ...fixture }) => {
        const locks = await fixture.warm({ storeTimeoutMs: 3000 })
        proxy.hold()
        const call = rejects(take(locks, 'name'), 'LOCK_STORE', { retryable: true })
        // Before the call ends: the release that follows reaches the server, whose answers alone are held back.
        await heldAtStore(direct, 'name')
        await call
        proxy.resume()
        await givenBack(direct, 'name')
        await givenBack(direct, 'name:2')
      })
    }

    test('an abort while the answer is on its way', async ({ proxy, direct, ...fixture }) => {
      const locks = await fixture.warm()
      proxy.hold()
      const controller = new AbortController()
      const reason = { mine: true }
      const call = rejection(locks.acquire('name', { ttlMs: 60_000, signal: controller.signal }))
      await heldAtStore(direct, 'name')
      controller.abort(reason)
      assert.equal(await call, reason)
      proxy.resume()
      await givenBack(direct, 'name')
    })

    test('an abort while the answer is on its way, and then the connection breaks', async ({ proxy, direct, ...fixture }) => {
      const locks = await fixture.warm()
      proxy.hold()
      const controller = new AbortController()
      const call = rejection(locks.acquire('name', { ttlMs: 60_000, signal: controller.signal }))
      await heldAtStore(direct, 'name')
      controller.abort()
      assert.equal((await call).name, 'AbortError')
      await proxy.down()
      await sleep(1000)
      proxy.resume()
      await proxy.up()
      await givenBack(direct, 'name')
    })

    test('waitMs is over while the answer is on its way', async ({ proxy, direct, ...fixture }) => {
      const locks = await fixture.warm({ storeTimeoutMs: 10_000 })
      proxy.hold()
      const startedAt = performance.now()
      const call = rejection(locks.acquire('name', { ttlMs: 60_000, waitMs: 1000 }))
      await heldAtStore(direct, 'name')
      const { code } = await call
      assert.ok(['LOCK_TIMEOUT', 'LOCK_STORE'].includes(code), code)
      assert.ok(performance.now() - startedAt < 2000 + SLACK_MS)
      proxy.resume()
      await givenBack(direct, 'name')
    })

    test('close() while the answer is on its way', async ({ proxy, direct, ...fixture }) => {
      const locks = await fixture.warm()
      proxy.hold()
      const call = rejects(locks.acquire('name', { ttlMs: 60_000 }), 'LOCK_CLOSED')
      await heldAtStore(direct, 'name')
      const closed = locks.close()
      await call
      proxy.resume()
      await closed
      await givenBack(direct, 'name')
    })

    test('the answer to a release is lost: it was released', async ({ proxy, direct, ...fixture }) => {
      const events = []
      const locks = await fixture.warm({ onEvent: ({ type, name }) => name !== 'warm' && events.push(type) })
      const lock = await locks.acquire('name', { ttlMs: 60_000 })
      const lost = proxy.loseReply(fixture.key('name'))
      const call = lock.release()
      await lost
      assert.equal(await isHeld(direct, 'name'), false)
      proxy.cut()
      assert.equal(await call, true)
      await until('the event', () => events.length === 2)
      assert.deepEqual(events, ['acquired', 'released'])
      assert.equal(lock.signal.aborted, false)
    })

    test('the answer to the release of using() is lost: its result counts', async ({ proxy, ...fixture }) => {
      const locks = await fixture.warm()
      const call = locks.using('name', { ttlMs: 60_000 }, () => {
        proxy.loseReply(fixture.key('name')).then(() => proxy.cut())
        return 'result'
      })
      assert.equal(await call, 'result')
    })

    test('the answer to a renewal is lost: the lease goes on', async ({ proxy, direct, ...fixture }) => {
      const locks = await fixture.warm()
      const lock = await locks.acquire('name', { ttlMs: 9000 })
      await proxy.loseReply(fixture.key('name'))
      const lostAt = performance.now()
      proxy.cut()
      // Past the end that the lease had when it was taken, which is at most 9 s after its first renewal.
      while (performance.now() < lostAt + 9500) {
        assert.equal(lock.isHeld, true)
        await sleep(100)
      }
      assert.equal(lock.isHeld, true)
      assert.equal(lock.signal.aborted, false)
      assert.equal((await direct.inspect('name')).fencingToken, lock.fencingToken)
      assert.equal(await lock.release(), true)
    })

    test('aborts in the middle of everything leave nothing', async ({ proxy, direct, ...fixture }) => {
      const locks = await fixture.warm({ storeTimeoutMs: 10_000 })
      proxy.lagMs = 8
      const mine = new Error('mine')
      const call = async (index) => {
        const controller = new AbortController()
        if (index % 5 > 0) setTimeout(() => controller.abort(mine), Math.random() * 400)
        const options = { ttlMs: 60_000, waitMs: 60_000, signal: controller.signal }
        try {
          const lock = await locks.acquire(`n:${index % 25}`, options)
          await sleep(Math.random() * 10)
          assert.equal(await lock.release(), true)
          return 'held'
        } catch (error) {
          assert.equal(error, mine)
          return 'aborted'
        }
      }
      const ends = await Promise.all(Array.from({ length: 250 }, (_, index) => call(index)))
      for (const end of ['held', 'aborted']) assert.ok(ends.includes(end), `none was ${end}`)
      await until('nothing left', async () => (await direct.list()).length === 0, 20_000)
      const { held, waiting, lost } = locks.stats()
      assert.deepEqual({ held, waiting, lost }, { held: 0, waiting: 0, lost: 0 })
    })

    test('connections that break all the time: one holder at a time, and nothing left', async ({ proxy, direct, ...fixture }) => {
      const services = await Promise.all([fixture.warm(), fixture.warm()])
      let [inside, most, count, done, isOver] = [0, 0, 0, 0, false]
      const cutting = (async () => {
        for (; !isOver; proxy.cut()) await sleep(20 + Math.random() * 60)
      })()
      const work = async (locks) => {
        for (let turn = 0; turn < 40; turn++) {
          try {
            await locks.using('name', { ttlMs: 20_000, waitMs: 30_000 }, async () => {
              most = Math.max(most, ++inside)
              const seen = count
              await sleep(Math.random() * 5)
              count = seen + 1
              inside--
              done++
            })
          } catch (error) {
            assert.equal(error.code, 'LOCK_STORE')
          }
        }
      }
      await Promise.all([...services, ...services].map(work))
      isOver = true
      await cutting
      assert.equal(most, 1)
      assert.equal(count, done)
      assert.ok(done > 40, `only ${done} turns`)
      await until('nothing left', async () => (await direct.list()).length === 0, 20_000)
    })
  })
}
