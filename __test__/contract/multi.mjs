// Several names in one lock: all or nothing, and no deadlock between overlapping sets.
import assert from 'node:assert/strict'
import { it } from 'node:test'
import { assertFree, assertGrowing, rejection, rejects, sleep, SOON_MS, timed, until, waiting } from '../tools.mjs'

export function multi(test, { ordered, engine }) {
  test('several names are acquired and released together', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire(['m2', 'm1', 'm2'])
    assert.equal(lock.name, 'm2')
    assert.deepEqual(lock.names, ['m2', 'm1'])
    for (const name of lock.names) {
      assert.equal(await b.tryAcquire(name), null)
      assert.equal((await b.inspect(name)).fencingToken, lock.fencingToken)
    }
    assert.equal(await lock.release(), true)
    for (const name of lock.names) await assertFree(b, name)
  })

  test('an attempt for several names acquires all or none of them', async (store) => {
    const [a, b] = await store.connectAll(2)
    const held = await a.acquire('m2')
    for (const names of [
      ['m1', 'm2', 'm3'],
      ['m3', 'm2'],
      ['m2', 'm9'],
    ]) {
      assert.equal(await b.tryAcquire(names), null)
      await rejects(b.acquire(names, { waitMs: 60 }), 'LOCK_TIMEOUT', { key: 'm2' })
    }
    for (const name of ['m1', 'm3', 'm9']) await assertFree(a, name)
    assert.deepEqual(
      (await a.list()).map((info) => info.name),
      ['m2'],
    )
    assert.equal(await held.release(), true)
  })

  test('acquire accepts a frozen array of one name, and as many names as the store takes', async (store) => {
    const [a, b] = await store.connectAll(2)
    const one = await a.acquire(Object.freeze(['only']))
    assert.deepEqual(one.names, ['only'])
    const { mostNames = 100 } = store
    const names = Array.from({ length: mostNames }, (_, i) => `many:${i}`)
    const many = await a.acquire(names)
    assert.deepEqual(many.names, names)
    assert.equal(await b.tryAcquire(['other', `many:${mostNames - 1}`]), null)
    assert.equal((await b.list({ prefix: 'many:' })).length, mostNames)
    if (store.mostNames) {
      const { message } = await rejects(a.acquire([...names, 'more']), 'LOCK_INVALID_ARGUMENT')
      assert.match(
        message,
        new RegExp(`names must be at most ${mostNames} names on ${store.engine}, got ${mostNames + 1}`),
      )
    }
    assert.deepEqual([await one.release(), await many.release()], [true, true])
  })

  test('acquire of a set waits until each of its names is free', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const [first, second] = [await a.acquire('m1'), await b.acquire('m2')]
    let isGranted = false
    const both = c.acquire(['m1', 'm2'], { waitMs: 60_000 }).then((lock) => ((isGranted = true), lock))
    await waiting(c, 1)
    await first.release()
    await sleep(100)
    assert.equal(isGranted, false)
    await second.release()
    const took = await timed(both)
    assert.ok(took < SOON_MS, `woken after ${took} ms`)
    assert.equal(await (await both).release(), true)
  })

  const SERVED = 'a set is served while other callers keep each of its names busy'
  // There an attempt rolls back the names before a busy one. Where there is no queue, no waiter has a place.
  if (engine === 'mongodb' && ordered) it.todo(`${SERVED}: with the issue "One of each"`)
  if (engine !== 'mongodb' && ordered) {
    test(SERVED, async (store) => {
      const services = await store.connectAll(3)
      let isServed = false
      const keepBusy = async (service, name) => {
        while (!isServed) await service.using(name, { waitMs: 80_000 }, () => sleep(20))
      }
      const busy = ['m1', 'm2'].flatMap((name) => services.slice(0, 2).map((service) => keepBusy(service, name)))
      await sleep(100)
      const took = await timed(
        services[2].using(['m2', 'm1'], { waitMs: 30_000 }, () => {}).finally(() => (isServed = true)),
      )
      await Promise.all(busy)
      assert.ok(took < 10 * SOON_MS, `${took} ms`)
    })
  }

  test('an aborted wait for a set leaves no lock', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const held = await a.acquire('m2')
    const controller = new AbortController()
    const call = rejection(b.acquire(['m1', 'm2', 'm3'], { waitMs: Infinity, signal: controller.signal }))
    await waiting(b, 1)
    controller.abort('enough')
    assert.equal(await call, 'enough')
    await assertFree(c, 'm1')
    await assertFree(c, 'm3')
    await held.release()
    await assertFree(c, 'm2')
  })

  test('overlapping sets never deadlock, and exclude each other', async (store) => {
    const services = await store.connectAll(3)
    const sets = [['m1', 'm2'], ['m2', 'm3'], ['m3', 'm1'], ['m3', 'm2', 'm1'], ['m1'], ['m2', 'm4']]
    const inside = new Map()
    const tokens = new Map()
    const work = async (index) => {
      for (let round = 0; round < 6; round++) {
        const names = sets[(index + round) % sets.length]
        await services[index % 3].using(names, { waitMs: 80_000 }, async ({ fencingToken }) => {
          for (const name of names) {
            assert.equal(inside.get(name) ?? 0, 0, `two holders of ${name}`)
            inside.set(name, 1)
            tokens.set(name, [...(tokens.get(name) ?? []), fencingToken])
          }
          await sleep(index % 3)
          for (const name of names) inside.set(name, 0)
        })
      }
    }
    await Promise.all(sets.map((_, index) => work(index)))
    for (const seen of tokens.values()) assertGrowing(seen)
  })

  test('the fencing token of a set is larger than every earlier token of its names', async (store) => {
    const [a, b] = await store.connectAll(2)
    const tokens = []
    for (const names of ['m1', 'm2', ['m1', 'm2'], 'm1', ['m2', 'm3'], ['m1', 'm3'], 'm2', ['m1', 'm2', 'm3']]) {
      for (const service of [a, b]) {
        const lock = await service.acquire(names)
        tokens.push([lock.names, lock.fencingToken])
        await lock.release()
      }
    }
    for (const name of ['m1', 'm2', 'm3']) {
      assertGrowing(tokens.filter(([names]) => names.includes(name)).map(([, token]) => token))
    }
  })

  test('a set that lost one of its names is lost, and its other names are released', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire(['m1', 'm2'], { ttlMs: 60_000 })
    assert.equal(await b.forceRelease('m2'), true)
    const theirs = await b.acquire('m2')
    await rejects(lock.extend(60_000), 'LOCK_LOST', { key: 'm1' })
    assert.equal(lock.isHeld, false)
    assert.equal(await lock.release(), false)
    await assertFree(b, 'm1')
    assert.equal(await a.tryAcquire('m2'), null)

    const second = await a.acquire(['m1', 'm3'])
    assert.equal(await b.forceRelease('m3'), true)
    assert.equal(await second.release(), false)
    await until('m1 is free', async () => (await b.inspect('m1')) === null)
    assert.equal(await theirs.release(), true)
  })

  test('a set expires as a whole', async (store) => {
    const [a, b] = await store.connectAll(2)
    await a.acquire(['m1', 'm2'], { ttlMs: 200, renew: false })
    const next = await b.acquire(['m2', 'm1'], { waitMs: 10_000 })
    assert.equal(await next.release(), true)
  })

  test('restore transfers a set as a whole', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const lock = await a.acquire(['m2', 'm1'], { renew: false })
    const theirs = await b.restore(lock.transferable())
    assert.deepEqual(theirs.names, ['m2', 'm1'])
    assert.equal(await c.tryAcquire('m1'), null)
    assert.equal(await theirs.release(), true)
    assert.equal(await lock.release(), false)
    const next = await c.acquire(['m1', 'm2'], { waitMs: SOON_MS })
    assert.equal(await next.release(), true)
  })
}
