// The common case on the fast lane: a free name is taken by plain commands, and whatever they cannot decide, the script does.
// (`seed.lua`, which raises the last token to the server's clock once a second, is left out of what is counted.)
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { readFile } from 'node:fs/promises'
import Redis from 'ioredis'
import { LockService } from '../index.js'
import { Monitor } from '../scripts/monitor.mjs'
import { startRedis } from '../scripts/servers.mjs'
import { assertFree, assertGrowing, rejects, sleep, until, waiting } from './tools.mjs'

const LAST = 'holdfast:last'
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
  const lock = await locks.acquire('warm', { metadata: 1 })
  await locks.inspect('warm')
  await lock.release()
  for (const service of [locks, peer]) await service.using('warm', { waitMs: 0 }, () => service.inspect('warm'))
})

after(async () => {
  other?.disconnect()
  await Promise.all([locks?.close(), peer?.close()])
  await redis?.stop()
})

const verbs = (monitor) =>
  monitor.commands.map((command) => /^"(\w+)"/.exec(command)[1].toLowerCase()).filter((verb) => verb !== 'eval')

/** Cuts every connection of ours, so that the next calls go over new ones. */
const cut = () => other.client('KILL', 'TYPE', 'normal', 'SKIPME', 'yes')

/** Until calls go by plain commands again. */
const plain = (service) =>
  until('a lane', async () => {
    const monitor = await Monitor.open(redis.port)
    await service.acquireLock('probe')
    await service.releaseLock('probe')
    await sleep(20)
    monitor.close()
    return verbs(monitor).includes('incrby')
  })

/** What a Monitor has seen, once that is so much. */
const seen = (monitor, count) => until(`${count} commands`, () => verbs(monitor).length >= count && verbs(monitor))
const TAKE = ['exists', 'set', 'incrby', 'mget']

test('a lock that is taken and released costs four plain commands and one script', async () => {
  const monitor = await Monitor.open(redis.port)
  assert.equal(await locks.acquireLock('n'), true)
  assert.equal(await locks.releaseLock('n'), true)
  await seen(monitor, 5)
  await sleep(50)
  assert.deepEqual(verbs(monitor), [...TAKE, 'evalsha'], 'nothing was written down of what is over')
  monitor.reset()
  const held = await peer.acquire('n')
  assert.deepEqual(await seen(monitor, 5), [...TAKE, 'evalsha'], 'what inspection tells was written down')
  monitor.reset()
  assert.equal(await locks.acquireLock('n'), false)
  assert.deepEqual(await seen(monitor, 4), TAKE, 'a try of a busy name')
  monitor.reset()
  for (let i = 0; i < 3; i++) assert.equal(await locks.acquireLock('n'), false)
  assert.deepEqual(await seen(monitor, 3), ['mget', 'mget', 'mget'], 'and again, which writes nothing')
  await held.release()
  await seen(monitor, 4)
  monitor.reset()
  assert.equal(await locks.acquireLock('n'), true)
  assert.deepEqual((await seen(monitor, 6)).slice(0, 5), ['mget', ...TAKE])
  assert.equal(await locks.releaseLock('n'), true)
  monitor.close()
})

test('nothing but the last token stays, however many names there were', async () => {
  await Promise.all(Array.from({ length: 500 }, (_, i) => locks.using(`one-time:${i}`, () => {})))
  assert.deepEqual(await other.keys('*'), [LAST])
  assert.equal(await other.pttl(LAST), -1)
})

test('tokens grow from plain commands to scripts and back, and no two are the same', async () => {
  const tokens = []
  for (let i = 0; i < 50; i++) {
    // Metadata, and several names, are for the script.
    const ways = [{}, { metadata: i }, {}]
    for (const [way, options] of ways.entries()) {
      const lock = await (i % 2 === 0 ? locks : peer).acquire(way === 1 && i % 3 === 0 ? ['grow', 'too'] : 'grow', options)
      tokens.push(lock.fencingToken)
      await lock.release()
    }
  }
  assertGrowing(tokens)
  const many = await Promise.all(Array.from({ length: 200 }, (_, i) => (i % 2 ? locks : peer).acquire(`many:${i}`)))
  assert.equal(new Set(many.map((lock) => lock.fencingToken)).size, 200)
  assert.ok(many.every((lock) => lock.fencingToken > tokens.at(-1)))
  await Promise.all(many.map((lock) => lock.release()))
})

test('a last token that was deleted, or is no number, is made anew, and larger than any before', async () => {
  const tokens = []
  const take = async () => {
    const lock = await locks.acquire('lost')
    tokens.push(lock.fencingToken)
    await lock.release()
  }
  await take()
  await other.del(LAST)
  await take()
  await other.flushall()
  await take()
  await other.set(LAST, 12)
  await take()
  assertGrowing(tokens)
  assert.equal(await other.get(LAST), String(tokens.at(-1)))
  await other.set(LAST, 'garbage')
  await take()
  assertGrowing(tokens)
  assert.equal(await other.get(LAST), String(tokens.at(-1)))
  await assertFree(locks, 'lost')
  await cut()
  await plain(locks)
})

test('a last token from before a failure is caught up with by whoever connects anew', async () => {
  const lock = await locks.acquire('older')
  await lock.release()
  // What a replica would have that missed the last hour, when it takes over.
  const older = String(lock.fencingToken - 3_600_000_000n)
  await cut()
  await plain(locks)
  // The scripts have caught up with it meanwhile, while there was no lane: here nothing else does.
  await other.set(LAST, older)
  await sleep(1100)
  const next = await locks.acquire('older')
  assert.ok(next.fencingToken > lock.fencingToken, `${next.fencingToken} after ${lock.fencingToken}`)
  await next.release()
})

test('a name that is free while others wait for it is not taken past them', async () => {
  const held = await locks.acquire('queued', { renew: false })
  const turns = []
  let finish
  const finished = new Promise((resolve) => (finish = resolve))
  const waiter = peer.using('queued', { waitMs: 20_000 }, () => {
    turns.push('waiter')
    // A waiter that was quick would have had its turn, and the name would be free again.
    return finished
  })
  await waiting(peer, 1)
  await until('its place', () => other.exists('holdfast:queue:{lock:queued}'))
  // As when the holder's lease ends.
  await other.del('lock:queued')
  assert.equal(await locks.acquireLock('queued'), false)
  finish()
  await waiter
  assert.deepEqual(turns, ['waiter'])
  assert.equal(await locks.acquireLock('queued'), true)
  assert.equal(await locks.releaseLock('queued'), true)
  assert.equal(await held.release(), false)
})

test('a queue of the dead holds nobody up', async () => {
  const [process, owner] = ['d'.repeat(32), 'e'.repeat(32)]
  await other.zadd('holdfast:queue:{lock:dead}', 5, `${process}:${owner}`, -5, process)
  assert.equal(await locks.acquireLock('dead'), true)
  assert.equal(await locks.releaseLock('dead'), true)
  assert.deepEqual(await other.keys('*dead*'), [])
})

test('whoever looks right after a grant is told of it, in this service and in another', async () => {
  for (let i = 0; i < 100; i++) {
    const lock = await locks.acquire('seen')
    const look = i % 2 === 0 ? peer : locks
    const info = i % 3 === 0 ? (await look.list({ prefix: 'seen' }))[0] : await look.inspect('seen')
    assert.equal(info.fencingToken, lock.fencingToken)
    assert.equal(info.holder.pid, process.pid)
    const restored = i % 5 === 0 && (await peer.restore(lock.toJSON()))
    if (restored) assert.equal((await look.inspect('seen')).fencingToken, lock.fencingToken)
    await (restored || lock).release()
  }
  // A token like ours that nobody has written anything of.
  await other.set('lock:bare', 'a'.repeat(32), 'PX', 60_000)
  const { holder, fencingToken } = await locks.inspect('bare')
  assert.deepEqual([holder, fencingToken], [null, null])
  await other.del('lock:bare')
})

test('what is told of a lock goes by the server’s clock, and lasts as long as the lock', async () => {
  const lock = await locks.acquire('told', { ttlMs: 60_000 })
  const key = 'holdfast:fence:{lock:told}'
  await until('it is written down', () => other.exists(key))
  const [fence, token, since, pid] = (await other.get(key)).split(' ')
  const [seconds] = await other.time()
  assert.deepEqual([fence, token, pid], [String(lock.fencingToken), lock.token, String(process.pid)])
  assert.ok(Math.abs(Number(since) / 1000 - seconds) < 10, since)
  const lead = (await other.pttl(key)) - (await other.pttl('lock:told'))
  assert.ok(Math.abs(lead - 61 * 60_000) < 1000, `${lead} ms`)
  assert.equal(await locks.forceRelease('told'), true)
  assert.deepEqual(await other.keys('*told*'), [])
  await lock.release()
})

test('a key of another type is an error and left alone', async () => {
  await other.hset('lock:hash', 'field', 1)
  const error = await rejects(locks.acquireLock('hash'), 'LOCK_STORE', { retryable: false })
  assert.match(error.message, /holds something that is no lock: .*WRONGTYPE/)
  assert.equal(await other.type('lock:hash'), 'hash')
  await other.del('lock:hash')
})

test('the scripts are sent anew when the server has forgotten them', async () => {
  for (let i = 0; i < 3; i++) {
    await other.script('FLUSH')
    const lock = await locks.acquire('flushed')
    await until('it is written down', () => other.exists('holdfast:fence:{lock:flushed}'))
    await other.script('FLUSH')
    assert.equal((await locks.inspect('flushed')).fencingToken, lock.fencingToken)
    await other.script('FLUSH')
    assert.equal(await lock.release(), true)
  }
})

test('the README’s user has the rights for it, and one without INCRBY has locks all the same', async () => {
  const readme = await readFile(new URL('../README.md', import.meta.url), 'utf8')
  const [, rule] = /```redis\n(ACL SETUSER holdfast[^`]*)```/.exec(readme)
  const words = rule.trim().replace('>PASSWORD', '>secret').split(/\s+/)
  await other.call(...words)
  const url = redis.url.replace('redis://', 'redis://holdfast:secret@')
  const ours = await LockService.connect(url)
  try {
    await plain(ours)
    const tokens = []
    for (const right of ['+incrby', '-incrby', '-incrby']) {
      await other.call('ACL', 'SETUSER', 'holdfast', right)
      const lock = await ours.acquire('rights')
      assert.equal((await ours.inspect('rights')).fencingToken, lock.fencingToken)
      tokens.push(lock.fencingToken)
      assert.equal(await lock.release(), true)
    }
    assertGrowing(tokens)
    await other.call('ACL', 'SETUSER', 'holdfast', '-set')
    const error = await rejects(ours.acquireLock('rights'), 'LOCK_STORE', { retryable: false })
    assert.match(error.message, /ACL forbids it/)
  } finally {
    await ours.close()
    await other.call('ACL', 'DELUSER', 'holdfast')
  }
})

test('a server that cannot take a write leaves nothing taken', async () => {
  for (const [begin, code, end] of [
    [['CONFIG', 'SET', 'maxmemory', '1'], 'OOM', ['CONFIG', 'SET', 'maxmemory', '0']],
    [['REPLICAOF', '127.0.0.1', '1'], 'READONLY', ['REPLICAOF', 'NO', 'ONE']],
    [['CONFIG', 'SET', 'min-replicas-to-write', '1'], 'NOREPLICAS', ['CONFIG', 'SET', 'min-replicas-to-write', '0']],
  ]) {
    // The call is repeated until the store's time is over: long enough that one attempt is answered on a machine that stands still.
    const impatient = await LockService.connect(redis.url, { storeTimeoutMs: 3000 })
    await other.call(...begin)
    try {
      const error = await rejects(impatient.acquireLock('refused'), 'LOCK_STORE', { retryable: true })
      assert.match(error.message, new RegExp(code))
      assert.equal(await other.exists('lock:refused'), 0)
    } finally {
      // The other tests use the same server.
      await other.call(...end)
    }
    await assertFree(impatient, 'refused')
    await impatient.close()
  }
})

test('a holder that is displaced before its token was drawn is not granted the lock', async (t) => {
  // The server gets the commands one by one, and somebody frees the name in between.
  const { createServer, connect } = await import('node:net')
  const displaced = []
  const proxy = createServer((client) => {
    const server = connect(redis.port, '127.0.0.1')
    for (const socket of [client, server]) socket.setNoDelay(true).on('error', () => {})
    server.pipe(client)
    client.on('close', () => server.destroy())
    client.on('data', (data) => {
      const at = data.indexOf('*3\r\n$6\r\nINCRBY')
      if (at < 0 || displaced.length > 0 || !data.includes('lock:between')) return server.write(data)
      displaced.push(true)
      server.write(data.subarray(0, at))
      client.pause()
      setTimeout(async () => {
        assert.equal(await peer.forceRelease('between'), true)
        displaced.push(await peer.acquire('between'))
        server.write(data.subarray(at))
        client.resume()
      }, 50)
    })
  })
  await new Promise((resolve) => proxy.listen(0, '127.0.0.1', resolve))
  t.after(() => proxy.close())
  const ours = await LockService.connect(`redis://127.0.0.1:${proxy.address().port}`)
  t.after(() => ours.close())
  await ours.acquireLock('probe')
  assert.equal(await ours.tryAcquire('between'), null)
  const [, holder] = displaced
  assert.equal(holder.isHeld, true)
  await holder.release()
  const next = await ours.acquire('between')
  assert.ok(next.fencingToken > holder.fencingToken)
  await next.release()
})

test('a busy thread’s lock is told of, with the time of its grant', async () => {
  const block = (ms) => {
    const end = performance.now() + ms
    while (performance.now() < end);
  }
  const lock = await locks.acquire('blocked')
  block(400)
  // The watchdog has written it down meanwhile: these are written before anything of this turn is sent.
  const [value, since] = await Promise.all([
    other.get('holdfast:fence:{lock:blocked}'),
    other.time().then(([seconds, micros]) => seconds * 1000 + micros / 1000),
  ])
  assert.ok(value?.startsWith(`${lock.fencingToken} ${lock.token} `), value)
  const age = since - Number(value.split(' ')[2])
  assert.ok(age >= 390, `granted ${age} ms ago`)
  await lock.release()
})

test('who keeps a name busy for minHoldMs is told, however short the job was', async () => {
  await locks.using('kept', { minHoldMs: 2000 }, () => {})
  const info = await peer.inspect('kept')
  assert.equal(info.holder?.pid, process.pid)
  assert.ok(info.fencingToken > 0n)
  assert.equal(await locks.forceRelease('kept'), true)
})

test('a lane that ends with grants to write down leaves that to the other connection', async () => {
  await plain(locks)
  const lanes = (await other.client('LIST')).trim().split('\n')
  const ids = lanes.filter((line) => / resp=2 /.test(line) && !/ cmd=client/.test(line)).map((line) => /^id=(\d+)/.exec(line)[1])
  const lock = await locks.acquire('salvaged')
  await Promise.all(ids.map((id) => other.client('KILL', 'ID', id).catch(() => {})))
  await until('it is told', async () => {
    const info = await locks.inspect('salvaged')
    return info.fencingToken === lock.fencingToken
  })
  await lock.release()
})

test('a redis:// URL of a cluster’s server works for what lies in one slot', async (t) => {
  const alone = await startRedis({ args: ['--cluster-enabled', 'yes', '--cluster-config-file', `nodes-${process.pid}.conf`] })
  t.after(() => alone.stop())
  const admin = new Redis(alone.url)
  t.after(() => admin.disconnect())
  await admin.call('CLUSTER', 'ADDSLOTSRANGE', 0, 16383)
  await until('the cluster is up', async () => /cluster_state:ok/.test(await admin.cluster('INFO')))
  const ours = await LockService.connect(alone.url)
  t.after(() => ours.close())
  const tokens = []
  for (const [names, options] of [['n', {}], ['n', { metadata: 1 }], [['{n}a', '{n}b'], {}], ['n', {}]]) {
    const lock = await ours.acquire(names, options)
    tokens.push(lock.fencingToken)
    assert.equal((await ours.inspect(lock.name)).fencingToken, lock.fencingToken)
    assert.equal(await lock.release(), true)
  }
  assertGrowing(tokens)
  assert.equal(await admin.exists(LAST), 0)
})
