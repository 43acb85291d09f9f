// Calls that Node's own event loop carries to Redis and back: what happens when it does not come round, and when their
// connection breaks.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { LockService } from '../index.js'
import { startRedis } from '../scripts/servers.mjs'
import { output, rejection, sleep, until } from './tools.mjs'

const index = new URL('../index.js', import.meta.url).href
let redis
let locks

before(async () => {
  redis = await startRedis()
  locks = await LockService.connect(redis.url, { keyPrefix: 'lane:' })
  // The event loop is asked to serve the connection, and comes round to it.
  await sleep(50)
})

after(async () => {
  await locks?.close()
  await redis?.stop()
})

const block = (ms) => {
  const until = performance.now() + ms
  while (performance.now() < until);
}

test('what was asked for before the event loop was blocked is granted, and renewed, meanwhile', async () => {
  const ttlMs = 600
  const call = locks.acquire('blocked', { ttlMs })
  block(4 * ttlMs)
  const { renewed } = locks.stats()
  assert.ok(renewed >= 3, `${renewed} renewals`)
  const lock = await call
  assert.equal(lock.isHeld, true)
  assert.equal(await lock.release(), true)
})

test('a wait that was asked for before the event loop was blocked goes on meanwhile', async () => {
  const other = await LockService.connect(redis.url, { keyPrefix: 'lane:' })
  const held = await other.acquire('handed', { ttlMs: 500, renew: false })
  const call = locks.acquire('handed', { ttlMs: 700 })
  block(3000)
  const lock = await call
  assert.ok(lock.fencingToken > held.fencingToken)
  assert.equal(lock.isHeld, true)
  await lock.release()
  await other.close()
})

test('a thousand calls in one turn, and each has its own answer', async () => {
  const names = Array.from({ length: 1000 }, (_, i) => `n${i}`)
  const taken = await Promise.all(names.map((name) => locks.tryAcquire(name)))
  const again = await Promise.all(names.map((name) => locks.acquireLock(name)))
  assert.ok(taken.every((lock, i) => lock.name === names[i]))
  assert.ok(again.every((held) => held === false))
  const fences = new Set(taken.map((lock) => lock.fencingToken))
  assert.equal(fences.size, 1000)
  assert.deepEqual(new Set(await Promise.all(taken.map((lock) => lock.release()))), new Set([true]))
})

test('a connection that breaks costs no call its answer', async () => {
  const { default: Redis } = await import('ioredis')
  const other = new Redis(redis.url)
  for (let round = 0; round < 20; round++) {
    const calls = Array.from({ length: 20 }, (_, i) => locks.tryAcquire(`broken${round}-${i}`))
    if (round % 2 === 0) await other.call('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')
    for (const lock of await Promise.all(calls)) await lock.release()
    await sleep(round * 10)
  }
  await until('nothing left', async () => (await locks.list()).length === 0)
  other.disconnect()
})

test('a call that throws out of a callback of ours is an uncaught exception, not a crash', async () => {
  const said = await output(`
    import { LockService } from ${JSON.stringify(index)}
    const locks = await LockService.connect(${JSON.stringify(redis.url)})
    process.on('uncaughtException', (error) => console.log('uncaught', error.message))
    await new Promise((resolve) => setTimeout(resolve, 50))
    locks.acquireLock('x').then(() => { process.nextTick(() => { throw new Error('mine') }) })
    await new Promise((resolve) => setTimeout(resolve, 200))
    console.log(await locks.releaseLock('x'))
  `)
  assert.equal(said.trim(), 'uncaught mine\ntrue')
})

test('a service that is closed in the middle of a turn answers every call', async () => {
  const brief = await LockService.connect(redis.url, { keyPrefix: 'lane:' })
  await sleep(50)
  const calls = Array.from({ length: 50 }, (_, i) => brief.tryAcquire(`closing${i}`).catch((error) => error))
  await brief.close()
  for (const answer of await Promise.all(calls)) {
    assert.ok(answer === null || answer.code === 'LOCK_CLOSED' || answer.isHeld === false, String(answer))
  }
  assert.equal((await rejection(brief.acquire('late'))).code, 'LOCK_CLOSED')
  await until('nothing left', async () => (await locks.list({ prefix: 'closing' })).length === 0)
})
