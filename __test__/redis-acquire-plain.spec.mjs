// The common case: plain commands acquire a free name, and the script decides all other cases. It also makes the
// first grant of each second, which raises the last fencing token to the server's clock.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { readFile } from 'node:fs/promises'
import { LockService } from '../index.js'
import { Monitor } from '../scripts/monitor.mjs'
import { startRedis } from '../scripts/servers.mjs'
import { startProxy } from './proxy.mjs'
import { openRedis } from './redis-client.mjs'
import { assertFree, assertGrowing, block, rejects, sleep, stallwatch, until, waiting } from './tools.mjs'

const LAST = 'holdfast:last'
let redis
let other
let locks
let peer

before(async () => {
  redis = await startRedis()
  other = openRedis(redis.url)
  locks = await LockService.connect(redis.url)
  peer = await LockService.connect(redis.url)
  // The server has the scripts from here on.
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

const verbs = (monitor) => monitor.commands.map((command) => String(/^"(\w+)"/.exec(command)?.[1]).toLowerCase())

/** Makes a grant by script, after which a service uses plain commands for a second. */
const grantByScript = async (service) => (await service.acquire('by script', { metadata: 1 })).release()

/** Breaks every connection of holdfast, so that the next calls use new ones. */
const cut = () => other.client('KILL', 'TYPE', 'normal', 'SKIPME', 'yes')

/** Waits until calls use plain commands again. */
const untilPlain = (service) =>
  until('plain commands', async () => {
    await grantByScript(service)
    const monitor = await Monitor.open(redis.port)
    await service.acquireLock('probe')
    await service.releaseLock('probe')
    await sleep(20)
    monitor.close()
    return verbs(monitor).includes('incrby')
  })

/** Waits until a Monitor has received `count` commands. Resolves to their names. */
const received = (monitor, count) => until(`${count} commands`, () => verbs(monitor).length >= count && verbs(monitor))
const ACQUIRE = ['exists', 'set', 'incrby', 'mget']

/**
 * Runs `body` with a new name. Plain commands are allowed for a second after a grant by script: if the machine stood still meanwhile,
 * a failure counts only when it is repeated.
 *
 * @param {(name: string) => Promise<void>} body
 */
async function inTime(body) {
  for (let attempt = 1; ; attempt++) {
    const stalledMs = stallwatch()
    try {
      return await body(`n${attempt}`)
    } catch (error) {
      if (attempt === 5 || stalledMs() < 250) throw error
    }
  }
}

/** @param {string} name */
async function countCommands(name) {
  for (const service of [locks, peer]) await untilPlain(service)
  const monitor = await Monitor.open(redis.port)
  await grantByScript(locks)
  await received(monitor, 2)
  monitor.reset()
  assert.equal(await locks.acquireLock(name), true)
  assert.equal(await locks.releaseLock(name), true)
  await received(monitor, 5)
  await sleep(50)
  assert.deepEqual(verbs(monitor), [...ACQUIRE, 'evalsha'], 'a released lock gets no record')
  await grantByScript(peer)
  await received(monitor, 7)
  monitor.reset()
  const held = await peer.acquire(name)
  assert.deepEqual(await received(monitor, 5), [...ACQUIRE, 'evalsha'], 'a held lock gets a record for inspect')
  await grantByScript(locks)
  await received(monitor, 7)
  monitor.reset()
  assert.equal(await locks.acquireLock(name), false)
  assert.deepEqual(await received(monitor, 4), ACQUIRE, 'an attempt for a busy name')
  monitor.reset()
  for (let i = 0; i < 3; i++) assert.equal(await locks.acquireLock(name), false)
  assert.deepEqual(await received(monitor, 3), ['mget', 'mget', 'mget'], 'further attempts write nothing')
  await held.release()
  await received(monitor, 4)
  await grantByScript(locks)
  await received(monitor, 6)
  monitor.reset()
  assert.equal(await locks.acquireLock(name), true)
  assert.deepEqual((await received(monitor, 6)).slice(0, 5), ['mget', ...ACQUIRE])
  assert.equal(await locks.releaseLock(name), true)
  monitor.close()
}

test('acquire and release cost four plain commands and one script', () => inTime(countCommands))

test('500 released names leave only the last fencing token', async () => {
  await Promise.all(Array.from({ length: 500 }, (_, i) => locks.using(`one-time:${i}`, () => {})))
  assert.deepEqual(await other.keys('*'), [LAST])
  assert.equal(await other.pttl(LAST), -1)
})

test('the first grant after a second is made by a script', async () => {
  await sleep(1100)
  const monitor = await Monitor.open(redis.port)
  assert.equal(await locks.acquireLock('n'), true)
  assert.equal(await locks.releaseLock('n'), true)
  assert.deepEqual(await received(monitor, 2), ['evalsha', 'evalsha'])
  monitor.close()
})

test('fencing tokens of plain commands and scripts grow and are unique', async () => {
  const tokens = []
  for (let i = 0; i < 50; i++) {
    // Metadata and several names need the script.
    for (const [index, options] of [{}, { metadata: i }, {}].entries()) {
      const lock = await (i % 2 === 0 ? locks : peer).acquire(
        index === 1 && i % 3 === 0 ? ['grow', 'too'] : 'grow',
        options,
      )
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

test('a deleted or invalid last token is replaced by a larger one than all before', async () => {
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
  await untilPlain(locks)
})

test('a new connection raises a last token that a failover has set back', async () => {
  const lock = await locks.acquire('older')
  await lock.release()
  // The value of a promoted replica that missed the last hour.
  const older = String(lock.fencingToken - 3_600_000_000n)
  await cut()
  await untilPlain(locks)
  // Scripts have raised the token before. From here on only plain commands run.
  await other.set(LAST, older)
  await sleep(1100)
  const next = await locks.acquire('older')
  assert.ok(next.fencingToken > lock.fencingToken, `${next.fencingToken} after ${lock.fencingToken}`)
  await next.release()
})

test('acquireLock returns false for a free name with waiters', async () => {
  const held = await locks.acquire('queued', { renew: false })
  const served = []
  let finish
  const finished = new Promise((resolve) => (finish = resolve))
  const waiter = peer.using('queued', { waitMs: 20_000 }, () => {
    served.push('waiter')
    // A fast waiter would have released the name before the check.
    return finished
  })
  await waiting(peer, 1)
  await until('its position', () => other.exists('holdfast:queue:{lock:queued}'))
  // The same as the expiry of the holder's lease.
  await other.del('lock:queued')
  assert.equal(await locks.acquireLock('queued'), false)
  finish()
  await waiter
  assert.deepEqual(served, ['waiter'])
  assert.equal(await locks.acquireLock('queued'), true)
  assert.equal(await locks.releaseLock('queued'), true)
  assert.equal(await held.release(), false)
})

test('a queue of dead waiters does not block an acquisition', async () => {
  const [process, owner] = ['d'.repeat(32), 'e'.repeat(32)]
  await other.zadd('holdfast:queue:{lock:dead}', 5, `${process}:${owner}`, -5, process)
  assert.equal(await locks.acquireLock('dead'), true)
  assert.equal(await locks.releaseLock('dead'), true)
  assert.deepEqual(await other.keys('*dead*'), [])
})

test('inspect and list return a lock right after its grant, in this service and in another one', async () => {
  for (let i = 0; i < 100; i++) {
    const lock = await locks.acquire('seen')
    const reader = i % 2 === 0 ? peer : locks
    const info = i % 3 === 0 ? (await reader.list({ prefix: 'seen' }))[0] : await reader.inspect('seen')
    assert.equal(info.fencingToken, lock.fencingToken)
    assert.equal(info.holder.pid, process.pid)
    const restored = i % 5 === 0 && (await peer.restore(lock.transferable()))
    if (restored) assert.equal((await reader.inspect('seen')).fencingToken, lock.fencingToken)
    await (restored || lock).release()
  }
  // An owner token without a record.
  await other.set('lock:bare', 'a'.repeat(32), 'PX', 60_000)
  const { holder, fencingToken } = await locks.inspect('bare')
  assert.deepEqual([holder, fencingToken], [null, null])
  const error = await rejects(locks.acquire('bare', { waitMs: 50 }), 'LOCK_TIMEOUT', { holder: null })
  assert.match(error.message, /held by a process of holdfast that has not written its name/)
  await other.set('lock:bare', 'a value', 'PX', 60_000)
  const foreign = await rejects(locks.acquire('bare', { waitMs: 50 }), 'LOCK_TIMEOUT', { holder: null })
  assert.match(foreign.message, /held by another tool/)
  await other.del('lock:bare')
})

test('the record of a lock has the server’s time and outlives the lock by 61 minutes', async () => {
  const lock = await locks.acquire('recorded', { ttlMs: 60_000 })
  const key = 'holdfast:fence:{lock:recorded}'
  await until('the record is written', () => other.exists(key))
  const [fence, token, since, pid] = (await other.get(key)).split(' ')
  const [seconds] = await other.time()
  assert.deepEqual([fence, token, pid], [String(lock.fencingToken), lock.token, String(process.pid)])
  assert.ok(Math.abs(Number(since) / 1000 - seconds) < 10, since)
  // In a transaction both are read at the same time.
  const ttls = await other.multi().pttl(key).pttl('lock:recorded').exec()
  const [ofRecord, ofLock] = (ttls ?? []).map(([, ms]) => Number(ms))
  const lead = ofRecord - ofLock
  assert.ok(Math.abs(lead - 61 * 60_000) < 1000, `${lead} ms`)
  assert.equal(await locks.forceRelease('recorded'), true)
  assert.deepEqual(await other.keys('*recorded*'), [])
  await lock.release()
})

test('acquireLock rejects for a key of another type and leaves it unchanged', async () => {
  await other.hset('lock:hash', 'field', 1)
  const error = await rejects(locks.acquireLock('hash'), 'LOCK_STORE', { retryable: false })
  assert.match(error.message, /has a value of another type: .*WRONGTYPE/)
  assert.equal(await other.type('lock:hash'), 'hash')
  await other.del('lock:hash')
})

test('the scripts are sent again after SCRIPT FLUSH', async () => {
  for (let i = 0; i < 3; i++) {
    await other.script('FLUSH')
    const lock = await locks.acquire('flushed')
    await until('the record is written', () => other.exists('holdfast:fence:{lock:flushed}'))
    await other.script('FLUSH')
    assert.equal((await locks.inspect('flushed')).fencingToken, lock.fencingToken)
    await other.script('FLUSH')
    assert.equal(await lock.release(), true)
  }
})

test('the documented user has sufficient rights, and acquires without INCRBY, too', async () => {
  const page = await readFile(new URL('../docs/stores/redis.md', import.meta.url), 'utf8')
  const [, rule] = /```redis\n(ACL SETUSER holdfast[^`]*)```/.exec(page) ?? ['', '']
  const [command, ...words] = rule.trim().replace('>PASSWORD', '>secret').split(/\s+/)
  await other.call(command, ...words)
  const url = redis.url.replace('redis://', 'redis://holdfast:secret@')
  const ours = await LockService.connect(url)
  try {
    await untilPlain(ours)
    const tokens = []
    for (const right of ['+incrby', '-incrby', '-incrby']) {
      await other.call('ACL', 'SETUSER', 'holdfast', right)
      const lock = await ours.acquire('rights')
      assert.equal((await ours.inspect('rights'))?.fencingToken, lock.fencingToken)
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

test('a server that rejects writes leaves no lock', async () => {
  /** @type {[[string, ...string[]], string, [string, ...string[]]][]} */
  const faults = [
    [['CONFIG', 'SET', 'maxmemory', '1'], 'OOM', ['CONFIG', 'SET', 'maxmemory', '0']],
    [['REPLICAOF', '127.0.0.1', '1'], 'READONLY', ['REPLICAOF', 'NO', 'ONE']],
    [['CONFIG', 'SET', 'min-replicas-to-write', '1'], 'NOREPLICAS', ['CONFIG', 'SET', 'min-replicas-to-write', '0']],
  ]
  for (const [begin, code, end] of faults) {
    // The call is repeated until the store timeout: long enough for one reply, although the machine may stall.
    const service = await LockService.connect(redis.url, { storeTimeoutMs: 3000 })
    await other.call(...begin)
    try {
      const error = await rejects(service.acquireLock('refused'), 'LOCK_STORE', { retryable: true })
      assert.match(error.message, new RegExp(code))
      assert.equal(await other.exists('lock:refused'), 0)
    } finally {
      // The other tests use the same server.
      await other.call(...end)
    }
    await assertFree(service, 'refused')
    await service.close()
  }
})

test('an attempt that loses its key before INCRBY is not granted the lock', async (t) => {
  // The server receives the commands one by one, and another service acquires the name in between.
  const displaced = []
  const proxy = await startProxy(redis.port, {
    intercept(data, connection) {
      const length = data.indexOf('*3\r\n$6\r\nINCRBY')
      if (length < 0 || displaced.length > 0 || !data.includes('lock:between')) return false
      displaced.push(true)
      const sendRest = connection.split(data, length)
      setTimeout(async () => {
        assert.equal(await peer.forceRelease('between'), true)
        displaced.push(await peer.acquire('between'))
        sendRest()
      }, 50)
      return true
    },
  })
  const ours = await LockService.connect(`redis://127.0.0.1:${proxy.port}`)
  t.after(async () => {
    await ours.close()
    await proxy.close()
  })
  await ours.acquireLock('probe')
  assert.equal(await ours.tryAcquire('between'), null)
  const [, holder] = displaced
  assert.equal(holder.isHeld, true)
  await holder.release()
  const next = await ours.acquire('between')
  assert.ok(next.fencingToken > holder.fencingToken)
  await next.release()
})

test('the record of a lock is written while the event loop is blocked, with the time of the grant', async () => {
  const lock = await locks.acquire('blocked')
  block(400)
  // The watchdog wrote the record meanwhile: these reads are sent before any command of this tick.
  const [value, since] = await Promise.all([
    other.get('holdfast:fence:{lock:blocked}'),
    other.time().then(([seconds, micros]) => seconds * 1000 + micros / 1000),
  ])
  assert.ok(value?.startsWith(`${lock.fencingToken} ${lock.token} `), value)
  const age = since - Number(value.split(' ')[2])
  assert.ok(age >= 390, `granted ${age} ms ago`)
  await lock.release()
})

test('inspect returns the holder of a name that minHoldMs keeps busy', async () => {
  await locks.using('kept', { minHoldMs: 20_000 }, () => {})
  const info = await peer.inspect('kept')
  assert.equal(info.holder?.pid, process.pid)
  assert.ok(info.fencingToken > 0n)
  assert.equal(await locks.forceRelease('kept'), true)
})

test('the next connection writes the pending records when the connection breaks', async () => {
  await untilPlain(locks)
  const clients = (await other.client('LIST')).trim().split('\n')
  const ids = clients
    .filter((line) => / name= .* resp=3\b/.test(line))
    .map((line) => String(/^id=(\d+)/.exec(line)?.[1]))
  assert.ok(ids.length > 0, 'there is no connection to break')
  const lock = await locks.acquire('pending')
  await Promise.all(ids.map((id) => other.client('KILL', 'ID', id).catch(() => {})))
  await until('inspect returns it', async () => {
    const info = await locks.inspect('pending')
    return info.fencingToken === lock.fencingToken
  })
  await lock.release()
})

test('a cluster of one node works for names in one slot', async (t) => {
  const alone = await startRedis({ args: ['--cluster-enabled', 'yes'] })
  t.after(() => alone.stop())
  const admin = openRedis(alone.url)
  t.after(() => admin.disconnect())
  await admin.call('CLUSTER', 'ADDSLOTSRANGE', 0, 16383)
  await until('the cluster is up', async () => /cluster_state:ok/.test(await admin.cluster('INFO')))
  const ours = await LockService.connect(alone.url.replace('redis:', 'redis+cluster:'))
  t.after(() => ours.close())
  const tokens = []
  /** @type {[string | string[], { metadata?: number }][]} */
  const grants = [
    ['n', {}],
    ['n', { metadata: 1 }],
    [['{n}a', '{n}b'], {}],
    ['n', {}],
  ]
  for (const [names, options] of grants) {
    const lock = await ours.acquire(names, options)
    tokens.push(lock.fencingToken)
    assert.equal((await ours.inspect(lock.name))?.fencingToken, lock.fencingToken)
    assert.equal(await lock.release(), true)
  }
  assertGrowing(tokens)
  assert.equal(await admin.exists(LAST), 0)
})
