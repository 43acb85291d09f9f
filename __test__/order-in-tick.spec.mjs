// Calls that one process makes in one tick of its event loop are granted in the order in which they were made.
import assert from 'node:assert/strict'
import { KINDS, suite } from './stores.mjs'
import { assertGrowing } from './tools.mjs'

/** Rounds by the number of calls in one tick. */
const ROUNDS = { 20: 3, 100: 2 }

/** Calls `acquire` `count` times in one tick. Returns the indexes and the fencing tokens in the order of the grants. */
async function grants(locks, name, count, held) {
  /** @type {[number[], bigint[]]} */
  const [order, tokens] = [[], []]
  const calls = Array.from({ length: count }, async (_, index) => {
    const lock = await locks.acquire(name, { waitMs: 60_000, ttlMs: 60_000 })
    order.push(index)
    tokens.push(lock.fencingToken)
    assert.equal(await lock.release(), true)
  })
  await held?.release()
  await Promise.all(calls)
  return { order, tokens }
}

const inOrder = (count) => Array.from({ length: count }, (_, index) => index)

for (const kind of Object.keys(KINDS)) {
  suite(kind, 'calls of one tick', (test) => {
    for (const count of [20, 100]) {
      const rounds = ROUNDS[count]
      for (const service of ['the same service', 'a fresh service']) {
        test(`${count} calls for a free name are granted in the order of the calls, on ${service}`, async (store) => {
          const same = await store.connect()
          await same.tryAcquire('warm').then((lock) => lock.release())
          for (let round = 0; round < rounds; round++) {
            const locks = service === 'the same service' ? same : await store.connect()
            const { order, tokens } = await grants(locks, `n${round}`, count)
            assert.deepEqual(order, inOrder(count), `round ${round}`)
            assertGrowing(tokens)
          }
        })
      }

      test(`${count} calls for a held name are granted in the order of the calls`, async (store) => {
        const [holder, locks] = await store.connectAll(2)
        for (let round = 0; round < rounds; round++) {
          const held = await holder.acquire(`n${round}`, { ttlMs: 60_000 })
          const { order, tokens } = await grants(locks, `n${round}`, count, held)
          assert.deepEqual(order, inOrder(count), `round ${round}`)
          assertGrowing([held.fencingToken, ...tokens])
        }
      })
    }
  })
}
