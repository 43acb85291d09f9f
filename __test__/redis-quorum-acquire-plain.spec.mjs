// The common case on a quorum: votes by plain commands, and the script decides all other cases.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { isDeepStrictEqual } from 'node:util'
import { LockService } from '../index.js'
import { Monitor } from '../scripts/monitor.mjs'
import { startRedis } from '../scripts/servers.mjs'
import { startProxy } from './proxy.mjs'
import { openRedis } from './redis-client.mjs'
import { assertGrowing, prepared, rejects, sleep, until } from './tools.mjs'

const VOTE = ['set', 'zadd', 'time', 'mget']
const COUNTER = /^holdfast:last:(\d+)$/
let nodes
let others
let locks
let peer

before(async () => {
  nodes = await Promise.all([1, 2, 3].map(() => startRedis()))
  others = nodes.map((node) => openRedis(node.url))
  locks = await LockService.connect(nodes.map((node) => node.url))
  peer = await LockService.connect(nodes.map((node) => node.url))
  // The servers have the scripts from here on.
  const lock = await locks.acquire('warm', { metadata: 1 })
  await locks.inspect('warm')
  await lock.release()
  const held = await locks.acquire('warm')
  await locks.inspect('warm')
  await held.release()
  await free()
})

after(async () => {
  for (const other of others ?? []) other.disconnect()
  await Promise.all([locks?.close(), peer?.close()])
  await Promise.all((nodes ?? []).map((node) => node.stop()))
})

const keys = () => Promise.all(others.map((other) => other.keys('*')))
/** Waits until no node has a lock. A release resolves when a majority has executed it. */
const free = () =>
  until('all names are free', async () => {
    const held = (await keys()).flat().filter((key) => !key.startsWith('holdfast:'))
    return held.length === 0
  })

/** Runs `body`, and waits until every node has received `count` commands. Resolves to the result and the commands of each node. */
async function observe(count, body) {
  const monitors = await Promise.all(nodes.map((node) => Monitor.open(node.port)))
  const verbs = ({ commands }) => commands.map((command) => String(/^"(\w+)"/.exec(command)?.[1]).toLowerCase())
  try {
    const result = await body()
    await until('all commands', () => monitors.every((monitor) => verbs(monitor).length >= count))
    await sleep(50)
    return { result, verbs: monitors.map(verbs) }
  } finally {
    for (const monitor of monitors) monitor.close()
  }
}

/**
 * Runs `body`, and asserts that every node receives exactly these commands. A vote that arrives after more than 100 ms is repeated by a
 * script: on a machine that stands still, `release` and `body` are repeated, a few times at most.
 *
 * @template T
 * @param {string[]} expected
 * @param {() => Promise<T>} body
 * @param {(result: T) => Promise<unknown>} [release]
 * @returns {Promise<T>}
 */
async function observeExactly(expected, body, release) {
  for (let attempt = 1; ; attempt++) {
    const { result, verbs } = await observe(expected.length, body)
    const onAll = Array(3).fill(expected)
    if (isDeepStrictEqual(verbs, onAll)) return result
    if (attempt === 5) assert.deepEqual(verbs, onAll)
    await release?.(result)
    await free()
  }
}

test('acquire and release cost four plain commands and one script on each node', async () => {
  // A released lock gets no record.
  await observeExactly([...VOTE, 'evalsha'], async () => {
    assert.equal(await locks.acquireLock('n'), true)
    assert.equal(await locks.releaseLock('n'), true)
  })
})

test('a held lock gets the same record on every node', async () => {
  const release = (lock) => lock.release()
  const lock = await observeExactly([...VOTE, 'evalsha'], () => locks.acquire('recorded'), release)
  for (const reader of [locks, peer]) {
    const info = await reader.inspect('recorded')
    assert.equal(info.fencingToken, lock.fencingToken)
    assert.equal(info.holder.pid, process.pid)
    assert.deepEqual(
      (await reader.list({ prefix: 'recorded' })).map(({ fencingToken }) => fencingToken),
      [lock.fencingToken],
    )
  }
  for (const other of others) {
    const [fence] = (await other.get('holdfast:fence:{lock:recorded}')).split(' ')
    assert.equal(BigInt(fence), lock.fencingToken)
  }
  assert.equal(await lock.release(), true)
  await free()
})

test('inspect returns a lock right after its grant', async () => {
  for (let i = 0; i < 50; i++) {
    const lock = await locks.acquire('seen')
    const info = await (i % 2 ? peer : locks).inspect('seen')
    assert.equal(info.fencingToken, lock.fencingToken)
    assert.equal(info.holder.pid, process.pid)
    assert.equal(await lock.release(), true)
  }
})

test('released names leave at most 1024 counters', async () => {
  await free()
  for (const other of others) await other.flushall()
  await Promise.all(Array.from({ length: 3000 }, (_, i) => prepared(() => locks.using(`one-time:${i}`, () => {}))))
  await free()
  for (const found of await keys()) {
    // A lock whose record was written leaves the mark of its release.
    const counters = found.filter((key) => !key.startsWith('holdfast:fence:'))
    assert.ok(counters.length > 900 && counters.length <= 1024, `${counters.length}`)
    for (const key of counters) assert.ok(Number(COUNTER.exec(key)?.[1]) < 1024, key)
  }
})

test('fencing tokens of plain commands and scripts grow across services', async () => {
  const tokens = []
  for (let i = 0; i < 60; i++) {
    // Metadata and several names need the script.
    for (const [index, options] of [{}, { metadata: i }, {}].entries()) {
      const names = index === 1 && i % 3 === 0 ? ['grow', 'too'] : 'grow'
      const lock = await (i % 2 === 0 ? locks : peer).acquire(names, { waitMs: 10_000, ...options })
      tokens.push(lock.fencingToken)
      await lock.release()
    }
  }
  assertGrowing(tokens)
  const many = await Promise.all(Array.from({ length: 300 }, (_, i) => (i % 2 ? locks : peer).acquire(`many:${i}`)))
  assert.ok(many.every((lock) => lock.fencingToken > tokens.at(-1)))
  await Promise.all(many.map((lock) => lock.release()))
})

test('a counter that is ahead of the clocks determines the fencing token', async () => {
  const lock = await locks.acquire('ahead')
  await lock.release()
  await free()
  const ahead = 4_000_000_000_000_000n
  for (const other of others.slice(1)) {
    for (const key of await other.keys('holdfast:last:*')) await other.zadd(key, 'GT', ahead, 'last')
  }
  const tokens = [ahead]
  for (let i = 1n; i <= 3n; i++) {
    const next = await (i % 2n ? peer : locks).acquire('ahead')
    // A vote that is repeated counts once more.
    assert.ok(next.fencingToken >= ahead + i && next.fencingToken < ahead + 100n, `${next.fencingToken}`)
    tokens.push(next.fencingToken)
    await next.release()
    await free()
  }
  assertGrowing(tokens)
  for (const other of others) await other.flushall()
})

test('a second attempt for a busy name uses the script, and changes nothing', async () => {
  const held = await peer.acquire('busy')
  await locks.inspect('busy')
  const first = await observe(1, () => locks.acquireLock('busy'))
  assert.equal(first.result, false)
  const second = await observe(1, () => locks.acquireLock('busy'))
  assert.equal(second.result, false)
  for (const verbs of second.verbs) assert.deepEqual(verbs, ['evalsha'])
  assert.equal((await locks.inspect('busy')).fencingToken, held.fencingToken)
  assert.equal(await held.release(), true)
  await free()
})

test('a release behind a late vote rolls the vote back without another command', async () => {
  /** @type {number[]} */
  const rounds = []
  // A machine that stands still repeats all releases.
  while (rounds.length < 5 && !rounds.some((scripts) => scripts < 30)) {
    const { verbs } = await observe(5, async () => {
      await others[2].client('PAUSE', 300, 'WRITE')
      for (let i = 0; i < 20; i++) {
        assert.equal(await locks.acquireLock(`late:${i}`), true)
        assert.equal(await locks.releaseLock(`late:${i}`), true)
      }
      await until('the late votes are gone', async () => (await others[2].keys('lock:late:*')).length === 0)
      await sleep(400)
    })
    await free()
    rounds.push(verbs[2].filter((verb) => verb === 'evalsha').length)
  }
  // A clean-up may repeat some releases. Another command for each of them would make 40.
  assert.ok(rounds[0] >= 20 && rounds.some((scripts) => scripts < 30), `${rounds} scripts`)
})

test('calls succeed while nodes lose their scripts or break their connections', async () => {
  for (let i = 0; i < 30; i++) {
    const other = others[i % 3]
    if (i % 2) await other.script('FLUSH')
    else await other.client('KILL', 'TYPE', 'normal', 'SKIPME', 'yes')
    const lock = await locks.acquire('n', { waitMs: 10_000 })
    assert.equal((await peer.inspect('n')).fencingToken, lock.fencingToken)
    assert.equal(await lock.release(), true)
  }
  await free()
})

/** Connects a service that reaches some nodes through proxies with this `intercept`. */
async function behindProxies(t, some, intercept) {
  const proxies = await Promise.all(some.map(({ port }) => startProxy(port, { intercept })))
  const ports = [...proxies, ...nodes.slice(some.length)].map(({ port }) => port)
  const service = await LockService.connect(ports.map((port) => `redis://127.0.0.1:${port}`))
  t.after(async () => {
    await service.close()
    await Promise.all(proxies.map((proxy) => proxy.close()))
  })
  return service
}

test('a vote that is cast and cannot be counted is rolled back', async () => {
  for (const other of others) await other.flushall()
  assert.equal(await locks.acquireLock('odd'), true)
  assert.equal(await locks.releaseLock('odd'), true)
  await free()
  const [counter] = (await keys())[0].filter((key) => COUNTER.test(key))
  for (const other of others) await other.set(counter, 'of another type')
  await rejects(locks.acquire('odd', { waitMs: 0 }), 'LOCK_STORE')
  await free()
  for (const other of others) await other.del(counter)
  assert.equal(await locks.acquireLock('odd'), true)
  assert.equal(await locks.releaseLock('odd'), true)
  await free()
})

test('a vote that arrives late uses the clock of the node', async (t) => {
  let reachedAt
  const ours = await behindProxies(t, nodes, (data, { server }) => {
    if (!data.includes('ZADD') || !data.includes('lock:slow')) return false
    setTimeout(() => {
      reachedAt ??= Date.now()
      server.write(data)
    }, 150)
    return true
  })
  const lock = await ours.acquire('slow')
  // At most 100 ms behind the clock of the node.
  assert.ok(lock.fencingToken >= BigInt(reachedAt - 100) * 1000n, `${lock.fencingToken} at ${reachedAt}`)
  assert.equal((await peer.inspect('slow')).fencingToken, lock.fencingToken)
  assert.equal(await lock.release(), true)
  await free()
})

test('an attempt that loses its keys during its votes is not granted the lock', async (t) => {
  // Two nodes receive the commands one by one, and another service acquires the name in between.
  const stopped = []
  const ours = await behindProxies(t, nodes.slice(0, 2), (data, connection) => {
    const length = data.indexOf('*6\r\n$4\r\nZADD')
    if (length < 0 || stopped.length === 2 || !data.includes('lock:between')) return false
    stopped.push(connection.split(data, length))
    return true
  })
  await ours.acquireLock('probe')
  const call = ours.tryAcquire('between')
  await until('both requests are split', () => stopped.length === 2)
  // The attempt has the votes of two nodes, but not their replies.
  await until('both votes are cast', async () =>
    (await Promise.all(others.map((other) => other.get('lock:between')))).every(Boolean),
  )
  assert.equal(await peer.forceRelease('between'), true)
  const holder = await peer.acquire('between')
  for (const sendRest of stopped) sendRest()
  assert.equal(await call, null)
  assert.equal(holder.isHeld, true)
  assert.equal((await peer.inspect('between')).fencingToken, holder.fencingToken)
  assert.equal(await holder.release(), true)
  await ours.releaseLock('probe')
  await free()
})

test('calls of one tick are served in the order of the calls', async () => {
  const expected = Array.from({ length: 20 }, (_, i) => i)
  for (let round = 0; round < 15; round++) {
    const service = await LockService.connect(nodes.map((node) => node.url))
    const order = []
    const calls = expected.map(async (i) => {
      const lock = await service.acquire('tick', { waitMs: 30_000 })
      order.push(i)
      await lock.release()
    })
    await Promise.all(calls)
    await service.close()
    assert.deepEqual(order, expected)
  }
})
