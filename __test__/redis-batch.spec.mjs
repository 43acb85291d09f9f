// The calls of one turn of the event loop share their commands on the fast lane. Each has its own outcome all the same.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import Redis from 'ioredis'
import { LockService } from '../index.js'
import { startRedis } from '../scripts/servers.mjs'
import { assertFree, assertGrowing, rejects, until, waiting } from './tools.mjs'

let redis
let other
let locks
let peer

before(async () => {
  redis = await startRedis()
  other = new Redis(redis.url)
  locks = await LockService.connect(redis.url)
  peer = await LockService.connect(redis.url)
  // The scripts are known to the server from here on.
  for (const service of [locks, peer]) for (let i = 0; i < 2; i++) await service.using('warm', () => service.inspect('warm'))
})

after(async () => {
  other?.disconnect()
  await Promise.all([locks?.close(), peer?.close()])
  await redis?.stop()
})

const named = (prefix, count) => Array.from({ length: count }, (_, i) => `${prefix}:${i}`)
const all = (names, act) => Promise.all(names.map(act))

/** How often the server has carried out each command since it was asked to forget. */
async function counts() {
  const stats = await other.info('commandstats')
  return Object.fromEntries([...stats.matchAll(/^cmdstat_(\w+):calls=(\d+)/gm)].map(([, verb, calls]) => [verb, Number(calls)]))
}

test('a hundred locks in one turn cost a few commands besides their own SET, and have tokens in the order of the calls', async () => {
  const names = named('turn', 100)
  await other.config('RESETSTAT')
  const held = await all(names, (name) => locks.acquire(name))
  await all(held, (lock) => lock.release())
  const { set, exists, incrby, mget, evalsha } = await counts()
  assert.equal(set, 100)
  // MGET, EXISTS and DEL are of the scripts, too.
  assert.ok(incrby <= 20, `${incrby} times INCRBY`)
  assert.equal(evalsha + incrby, mget)
  assert.equal(exists, mget)
  assert.ok(evalsha <= 20, `${evalsha} times EVALSHA`)
  assertGrowing(held.map((lock) => lock.fencingToken))
  await other.config('RESETSTAT')
  const taken = await all(names, (name) => peer.acquire(name))
  // The first tries tell the service that they are busy, and those after them only look.
  assert.deepEqual(new Set(await all(names, (name) => locks.acquireLock(name))), new Set([false]))
  await other.config('RESETSTAT')
  assert.deepEqual(new Set(await all(names, (name) => locks.acquireLock(name))), new Set([false]))
  const looked = await counts()
  assert.ok(looked.mget <= 20 && looked.set === undefined, JSON.stringify(looked))
  await all(taken, (lock) => lock.release())
  assert.deepEqual(await other.keys('*turn*'), [])
})

test('tokens of two services that take turns and crowds grow', async () => {
  const last = []
  for (let round = 0; round < 20; round++) {
    const service = round % 2 ? locks : peer
    const held = await all(named('grow', 1 + (round % 7) * 10), (name) => service.acquire(name))
    const tokens = held.map((lock) => lock.fencingToken)
    assert.ok(last.every((token) => tokens.every((next) => next > token)))
    last.splice(0, last.length, ...tokens)
    await all(held, (lock) => lock.release())
  }
})

test('of names in one turn only those that are busy are refused, and one name is given once', async () => {
  const names = named('some', 30)
  const busy = await all(names.filter((_, i) => i % 3 === 0), (name) => peer.acquire(name))
  const taken = await all(names, (name) => locks.tryAcquire(name))
  assert.deepEqual(taken.map((lock) => lock === null), names.map((_, i) => i % 3 === 0))
  const rivals = await all(Array(20).fill('one'), (name) => locks.tryAcquire(name))
  assert.equal(rivals.filter(Boolean).length, 1)
  assert.notEqual(rivals[0], null, 'the first to ask')
  const released = await all([...busy, ...taken, ...rivals].filter(Boolean), (lock) => lock.release())
  assert.ok(released.every(Boolean))
})

test('a name that others wait for is handed on, and those beside it are granted', async () => {
  // Its holder has died, and a waiter that counts as alive is in line.
  const held = await peer.acquire('line:7', { renew: false })
  let finish
  const finished = new Promise((resolve) => (finish = resolve))
  const served = []
  const waiter = peer.using('line:7', { waitMs: 20_000 }, (lock) => {
    served.push(lock.fencingToken)
    return finished
  })
  await waiting(peer, 1)
  await until('its place', () => other.exists('holdfast:queue:{lock:line:7}'))
  await other.del('lock:line:7')
  const taken = await all(named('line', 20), (name) => locks.tryAcquire(name))
  assert.deepEqual(taken.flatMap((lock, i) => (lock ? [] : [i])), [7])
  finish()
  await waiter
  assert.equal(served.length, 1)
  await all(taken.filter(Boolean), (lock) => lock.release())
  assert.equal(await held.release(), false)
  await assertFree(locks, 'line:7')
})

test('releases of one turn: what is waited for is handed on, what is lost is told, and the rest is free', async () => {
  const held = await all(named('free', 30), (name) => locks.acquire(name))
  const order = []
  const waiters = [3, 4].map((i) => peer.using(`free:${i}`, { waitMs: 20_000 }, (lock) => order.push([i, lock.fencingToken > held[i].fencingToken])))
  await waiting(peer, 2)
  await until('their places', async () => (await other.exists('holdfast:queue:{lock:free:3}', 'holdfast:queue:{lock:free:4}')) === 2)
  await other.del('lock:free:10')
  await other.set('lock:free:11', 'f'.repeat(32))
  const released = await all(held, (lock) => lock.release())
  assert.deepEqual(released.flatMap((freed, i) => (freed ? [] : [i])), [10, 11])
  await Promise.all(waiters)
  assert.deepEqual(order.sort(), [[3, true], [4, true]])
  assert.equal(await other.get('lock:free:11'), 'f'.repeat(32), 'a stranger’s')
  await other.del('lock:free:11')
  assert.deepEqual(await other.keys('lock:free:*'), [])
})

test('a key that holds something else is the fault of one release, and of one try', async () => {
  const names = named('type', 20)
  const held = await all(names, (name) => locks.acquire(name))
  await other.del('lock:type:5')
  await other.hset('lock:type:5', 'field', 1)
  const outcomes = await Promise.allSettled(held.map((lock) => lock.release()))
  assert.deepEqual(outcomes.flatMap(({ status }, i) => (status === 'rejected' ? [i] : [])), [5])
  assert.match(outcomes[5].reason.message, /WRONGTYPE/)
  const again = names.map((name) => locks.acquireLock(name))
  const error = await rejects(again.splice(5, 1)[0], 'LOCK_STORE', { retryable: false })
  assert.match(error.message, /holds something that is no lock: .*WRONGTYPE/)
  assert.ok((await Promise.all(again)).every(Boolean))
  await all(names.filter((_, i) => i !== 5), (name) => locks.releaseLock(name))
  assert.equal(await other.type('lock:type:5'), 'hash')
  await other.del('lock:type:5')
})

test('two handles of one lock that are released in one turn free it once', async () => {
  const lock = await locks.acquire('twice')
  const handle = await locks.restore(lock.toJSON())
  assert.deepEqual((await Promise.all([lock.release(), handle.release()])).sort(), [false, true])
  assert.equal(await other.exists('lock:twice'), 0)
})

test('what is asked for in one turn is carried out in that order', async () => {
  for (let i = 0; i < 50; i++) {
    const first = await locks.acquire('order')
    const [released, second] = await Promise.all([first.release(), locks.tryAcquire('order')])
    assert.deepEqual([released, second?.isHeld], [true, true])
    const [third, freed] = await Promise.all([locks.tryAcquire('order'), second.release()])
    assert.deepEqual([third, freed], [null, true])
  }
})

test('the script is sent anew when the server has forgotten it, and nothing is released twice or not at all', async () => {
  for (let i = 0; i < 3; i++) {
    const held = await all(named('forgotten', 50), (name) => locks.acquire(name))
    await other.script('FLUSH')
    assert.ok((await all(held, (lock) => lock.release())).every(Boolean))
    assert.deepEqual(await other.keys('lock:forgotten*'), [])
  }
})

test('a right that is missing for one name is that name’s trouble', async (t) => {
  await other.call(
    ...['ACL', 'SETUSER', 'some', 'on', '>secret', 'resetkeys', '~lock:mine:*', '~holdfast:*', '&holdfast:*', '+@all'],
  )
  const ours = await LockService.connect(redis.url.replace('redis://', 'redis://some:secret@'))
  t.after(async () => {
    await ours.close()
    await other.call('ACL', 'DELUSER', 'some')
  })
  for (let i = 0; i < 3; i++) {
    const names = [...named('mine', 10), 'theirs', ...named('mine:more', 10)]
    const outcomes = await Promise.allSettled(names.map((name) => ours.acquire(name)))
    assert.deepEqual(outcomes.flatMap(({ status }, index) => (status === 'rejected' ? [index] : [])), [10])
    assert.match(outcomes[10].reason.message, /ACL forbids it/)
    const held = outcomes.flatMap(({ value }) => value ?? [])
    assertGrowing([...held].map((lock) => lock.fencingToken).sort())
    assert.ok((await all(held, (lock) => lock.release())).every(Boolean))
  }
})
