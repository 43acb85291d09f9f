// Calls of services whose sockets or tasks Node's event loop polls: while the loop is blocked, and at the end of a service. For stores
// of different kinds. They run one at a time: a blocked event loop would block the others.
import assert from 'node:assert/strict'
import { once } from 'node:events'
import { Worker } from 'node:worker_threads'
import { block, INDEX, output, rejection, sleep, until } from './tools.mjs'

/** Holds `handed`. After a message it waits for the name behind another waiter, and releases it. */
const HOLDER = `
  const { parentPort, workerData: { index, target, options } } = require('node:worker_threads')
  import(index).then(async ({ LockService }) => {
    const [locks, next] = [await LockService.connect(target, options), await LockService.connect(target, options)]
    const lock = await locks.acquire('handed')
    parentPort.once('message', async () => {
      const waiting = next.acquire('handed', { waitMs: 30_000 })
      while ((await locks.inspect('handed')).waiting < 2) {}
      await lock.release()
      const { fencingToken } = await waiting
      await Promise.all([locks.close(), next.close()])
      parentPort.postMessage({ fencingToken })
    })
    parentPort.postMessage('held')
  })`

/**
 * A store of a test: connects services, which the test does not close, and what another process connects with.
 * `hasUniqueTokens`: no two names have the same fencing token.
 *
 * @typedef {object} Store
 * @property {(options?: import('../index.js').ConnectOptions) => Promise<import('../index.js').LockService>} connect
 * @property {string | object} target
 * @property {object} options
 * @property {boolean} [hasUniqueTokens]
 */

/**
 * Declares the cases. `declare` declares a test, and calls its body with a store.
 *
 * @param {(name: string, body: (store: Store) => Promise<void>) => void} declare
 */
export function eventLoopCases(declare) {
  declare('a call made before the event loop is blocked is granted and renewed while it is blocked', async (store) => {
    const ttlMs = 2000
    const locks = await store.connect()
    await locks.using('warm', () => {})
    const call = locks.acquire('blocked', { ttlMs })
    block(3 * ttlMs)
    const { renewed } = locks.stats()
    assert.ok(renewed >= 1, `${renewed} renewals`)
    const lock = await call
    assert.equal(lock.isHeld, true)
    assert.equal(await lock.release(), true)
  })

  declare('a wait that began before the event loop is blocked continues while it is blocked', async (store) => {
    const [locks, other] = await Promise.all([store.connect(), store.connect()])
    // In the second round, the connection that receives the messages to waiters is open.
    for (let round = 0; round < 2; round++) {
      const held = await other.acquire('waited', { ttlMs: 500, renew: false })
      const call = locks.acquire('waited', { ttlMs: 2500 })
      block(4000)
      const lock = await call
      assert.ok(lock.fencingToken > held.fencingToken)
      assert.equal(lock.isHeld, true)
      await lock.release()
    }
  })

  declare('a hand-off to a service whose event loop is blocked is received and extended', async (store) => {
    const locks = await store.connect()
    const worker = new Worker(HOLDER, {
      eval: true,
      workerData: { index: INDEX, target: store.target, options: store.options },
    })
    await once(worker, 'message')
    // A grant waits for the event loop for almost a third of the ttl: longer than it is blocked.
    const call = locks.acquire('handed', { ttlMs: 30_000, waitMs: 30_000 })
    await until('the waiter is in the queue', async () => (await locks.inspect('handed'))?.waiting === 1)
    // The connection that listens has its reply, and the next heartbeat is later than the end of a hand-off.
    await sleep(2500)
    const later = once(worker, 'message')
    worker.postMessage('release')
    block(5000)
    const lock = await call
    assert.equal(lock.isHeld, true)
    assert.equal(await lock.release(), true)
    const [{ fencingToken }] = await later
    assert.ok(fencingToken > lock.fencingToken)
    await worker.terminate()
  })

  declare('1024 calls in one tick have their own results', async (store) => {
    const locks = await store.connect()
    const names = Array.from({ length: 1024 }, (_, i) => `n${i}`)
    const taken = await Promise.all(names.map((name) => locks.tryAcquire(name)))
    const again = await Promise.all(names.map((name) => locks.acquireLock(name)))
    assert.ok(taken.every((lock, i) => lock?.name === names[i]))
    assert.ok(again.every((held) => held === false))
    if (store.hasUniqueTokens) assert.equal(new Set(taken.map((lock) => lock?.fencingToken)).size, names.length)
    assert.deepEqual(new Set(await Promise.all(taken.map((lock) => lock?.release()))), new Set([true]))
  })

  declare('an error thrown in a callback of a settled call is an uncaught exception, not a crash', async (store) => {
    const stdout = await output(`
      import { LockService } from ${JSON.stringify(INDEX)}
      const locks = await LockService.connect(${JSON.stringify(store.target)}, ${JSON.stringify(store.options)})
      process.on('uncaughtException', (error) => console.log('uncaught', error.message))
      await locks.using('warm', () => {})
      locks.acquireLock('x').then(() => { process.nextTick(() => { throw new Error('mine') }) })
      await new Promise((resolve) => setTimeout(resolve, 500))
      console.log(await locks.releaseLock('x'))
      await locks.close()
    `)
    assert.equal(stdout.trim(), 'uncaught mine\ntrue')
  })

  declare('every call of a service that is closed in the same tick settles', async (store) => {
    const [brief, other] = await Promise.all([store.connect(), store.connect()])
    await brief.using('warm', () => {})
    const calls = Array.from({ length: 50 }, (_, i) => brief.tryAcquire(`closing${i}`).catch((error) => error))
    await brief.close()
    for (const answer of await Promise.all(calls)) {
      assert.ok(answer === null || answer.code === 'LOCK_CLOSED' || answer.isHeld === false, String(answer))
    }
    assert.equal((await rejection(brief.acquire('late'))).code, 'LOCK_CLOSED')
    await until('nothing is left', async () => (await other.list({ prefix: 'closing' })).length === 0)
  })
}
