// Calls that Node's own event loop carries to Redis and back: what happens when it does not come round, and when their
// connection breaks.
import assert from 'node:assert/strict'
import { once } from 'node:events'
import { setTimeout as sleep } from 'node:timers/promises'
import { after, before, test } from 'node:test'
import { Worker } from 'node:worker_threads'
import Redis from 'ioredis'
import { LockService } from '../index.js'
import { startRedis } from '../scripts/servers.mjs'
import { startProxy } from './proxy.mjs'
import { output, rejection, until } from './tools.mjs'

const index = new URL('../index.js', import.meta.url).href
let redis
let other
let locks

before(async () => {
  redis = await startRedis()
  other = new Redis(redis.url)
  locks = await LockService.connect(redis.url, { keyPrefix: 'lane:' })
})

after(async () => {
  other?.disconnect()
  await locks?.close()
  await redis?.stop()
})

/** The server's connections of a kind: the lane's speak RESP2, the others RESP3, and this one's own is no matter. */
async function connections(resp) {
  const lines = (await other.client('LIST')).trim().split('\n')
  const fields = lines.map((line) => Object.fromEntries(line.split(' ').map((field) => field.split('='))))
  return fields.filter((client) => client.resp === String(resp) && /^(evalsha|eval|hello|mget)$/.test(client.cmd))
}

const block = (ms) => {
  const until = performance.now() + ms
  while (performance.now() < until);
}

test('what was asked for before the event loop was blocked is granted, and renewed, meanwhile', async () => {
  const ttlMs = 600
  const call = locks.acquire('blocked', { ttlMs })
  block(4 * ttlMs)
  const { renewed } = locks.stats()
  assert.ok(renewed >= 1, `${renewed} renewals`)
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

test('the calls go by the lane, and the rest does not', async () => {
  assert.equal(await locks.acquireLock('which'), true)
  const lanes = await connections(2)
  assert.equal(lanes.length, 1)
  assert.match(lanes[0].cmd, /^(mget|evalsha)$/)
  // A waiter hears by the other connection.
  const waiter = LockService.connect(redis.url, { keyPrefix: 'lane:' }).then(async (own) => {
    const lock = await own.acquire('which')
    await lock.release()
    await own.close()
  })
  await until('it waits', async () => Number((await other.pubsub('CHANNELS', 'holdfast:to:*')).length) >= 1)
  assert.equal(await locks.releaseLock('which'), true)
  await waiter
})

test('a lane that breaks costs no call its answer, and is made anew', async () => {
  for (let round = 0; round < 3; round++) {
    await until('a lane', async () => {
      await locks.tryAcquire('any').then((lock) => lock.release())
      return (await connections(2)).length === 1
    })
    const [{ id }] = await connections(2)
    const calls = Array.from({ length: 20 }, (_, i) => locks.tryAcquire(`broken${round}-${i}`))
    await other.client('KILL', 'ID', id)
    for (const lock of await Promise.all(calls)) await lock.release()
  }
  await until('nothing left', async () => (await locks.list()).length === 0)
})

test('a lane that is silent while the server answers is given up after storeTimeoutMs', async () => {
  const storeTimeoutMs = 4000
  const proxy = await startProxy(Number(new URL(redis.url).port))
  const own = await LockService.connect(`redis://127.0.0.1:${proxy.port}`, { keyPrefix: 'lane:', storeTimeoutMs })
  try {
    // An acquisition by the lane, whose replies get lost from then on.
    const lost = proxy.loseReply('$6\r\nEXISTS')
    const calls = []
    await until('one went by the lane', async () => {
      calls.push(own.acquireLock(`silent${calls.length}`).catch(() => false))
      return Promise.race([calls.at(-1).then(() => false), lost])
    })
    await sleep(storeTimeoutMs)
    // A call of now goes the ordinary way, and waits for nothing that the lane may yet bring.
    const lock = await Promise.race([own.tryAcquire('heard'), sleep(storeTimeoutMs / 2)])
    assert.ok(lock?.isHeld)
    await lock.release()
    await Promise.all(calls.map(async (call, i) => (await call) && own.releaseLock(`silent${i}`)))
  } finally {
    await own.close()
    await proxy.close()
  }
  await until('nothing left', async () => (await locks.list()).length === 0)
})

test('services that come and go leave no connection behind', async () => {
  const before = (await connections(2)).length + (await connections(3)).length
  for (let i = 0; i < 20; i++) {
    const brief = await LockService.connect(redis.url, { keyPrefix: 'lane:' })
    assert.equal(await brief.releaseLock('never held'), false)
    await brief.close()
  }
  await until('they are gone', async () => (await connections(2)).length + (await connections(3)).length <= before)
})

test('calls that are answered at once are answered one after the other, with nothing else going on', async () => {
  const messages = await output(`
    import { LockService } from ${JSON.stringify(index)}
    const locks = await LockService.connect(${JSON.stringify(redis.url)})
    const lock = await locks.acquire('bare')
    await lock.release()
    for (let i = 0; i < 100; i++) {
      await locks.releaseLock('never held')
      await lock.release()
    }
    const memory = await LockService.connect('memory:bare')
    for (let i = 0; i < 100; i++) await memory.acquireLock('n' + i)
    await memory.close()
    await locks.close()
    for (let i = 0; i < 100; i++) await locks.acquireLock('late').catch((error) => error.code)
    console.log('done')
  `)
  assert.equal(messages, 'done')
})

const WORKER = `
  const { parentPort, workerData: { index, url, name } } = require('node:worker_threads')
  import(index).then(async ({ LockService }) => {
    const locks = await LockService.connect(url)
    await locks.acquire(name)
    locks.acquire(name, { waitMs: Infinity })
    for (let i = 0; i < 10; i++) locks.acquireLock(name + i)
    parentPort.postMessage('waits')
  })`

test('a worker that is stopped in the middle of its calls leaves nothing open', async () => {
  // Of every kind: what a connection did last, which tells the kinds apart, changes with time.
  const all = async () => (await other.client('LIST')).trim().split('\n').length
  await (await locks.acquire('warm')).release()
  const before = await all()
  for (let i = 0; i < 5; i++) {
    const workerData = { index, url: redis.url, name: `of a worker ${i}` }
    const worker = new Worker(WORKER, { eval: true, workerData })
    await once(worker, 'message')
    await worker.terminate()
  }
  await until('they are gone', async () => (await all()) <= before)
})

test('a call that throws out of a callback of ours is an uncaught exception, not a crash', async () => {
  const messages = await output(`
    import { LockService } from ${JSON.stringify(index)}
    const locks = await LockService.connect(${JSON.stringify(redis.url)})
    process.on('uncaughtException', (error) => console.log('uncaught', error.message))
    await new Promise((resolve) => setTimeout(resolve, 50))
    locks.acquireLock('x').then(() => { process.nextTick(() => { throw new Error('mine') }) })
    await new Promise((resolve) => setTimeout(resolve, 200))
    console.log(await locks.releaseLock('x'))
  `)
  assert.equal(messages.trim(), 'uncaught mine\ntrue')
})

test('a service that is closed in the middle of a turn answers every call', async () => {
  const brief = await LockService.connect(redis.url, { keyPrefix: 'lane:' })
  const calls = Array.from({ length: 50 }, (_, i) => brief.tryAcquire(`closing${i}`).catch((error) => error))
  await brief.close()
  for (const answer of await Promise.all(calls)) {
    assert.ok(answer === null || answer.code === 'LOCK_CLOSED' || answer.isHeld === false, String(answer))
  }
  assert.equal((await rejection(brief.acquire('late'))).code, 'LOCK_CLOSED')
  await until('nothing left', async () => (await locks.list({ prefix: 'closing' })).length === 0)
})
