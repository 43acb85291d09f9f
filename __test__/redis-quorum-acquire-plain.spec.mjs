// The common case on a quorum: votes by plain commands on the nodes' fast lanes, and whatever those cannot decide, the script
// does.
import assert from 'node:assert/strict'
import { createServer, connect } from 'node:net'
import { after, before, test } from 'node:test'
import Redis from 'ioredis'
import { LockService } from '../index.js'
import { Monitor } from '../scripts/monitor.mjs'
import { startRedis } from '../scripts/servers.mjs'
import { assertGrowing, rejects, sleep, until } from './tools.mjs'

const VOTE = ['set', 'zadd', 'time', 'mget']
const COUNTER = /^holdfast:last:(\d+)$/
let nodes
let others
let locks
let peer

before(async () => {
  nodes = await Promise.all([1, 2, 3].map(() => startRedis()))
  others = nodes.map((node) => new Redis(node.url))
  locks = await LockService.connect(nodes.map((node) => node.url))
  peer = await LockService.connect(nodes.map((node) => node.url))
  // The scripts are known to the servers from here on.
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
/** Until no node has a lock. A release counts when most of them have heard of it. */
const free = () =>
  until('all free', async () => {
    const held = (await keys()).flat().filter((key) => !key.startsWith('holdfast:'))
    return held.length === 0
  })

/** What every node hears while `body` runs, as soon as each has heard so much. */
async function heard(count, body) {
  const monitors = await Promise.all(nodes.map((node) => Monitor.open(node.port)))
  const verbs = ({ commands }) => commands.map((command) => /^"(\w+)"/.exec(command)[1].toLowerCase())
  try {
    const result = await body()
    await until('all commands', () => monitors.every((monitor) => verbs(monitor).length >= count))
    await sleep(50)
    return { result, verbs: monitors.map(verbs) }
  } finally {
    for (const monitor of monitors) monitor.close()
  }
}

test('a lock that is taken and released costs four plain commands and one script at each node', async () => {
  const { verbs } = await heard(5, async () => {
    assert.equal(await locks.acquireLock('n'), true)
    assert.equal(await locks.releaseLock('n'), true)
  })
  assert.deepEqual(verbs, Array(3).fill([...VOTE, 'evalsha']), 'nothing was written down of what is over')
})

test('what inspection tells of a lock that is held for longer is written down, and tells the same everywhere', async () => {
  const { result: lock, verbs } = await heard(5, () => locks.acquire('told'))
  assert.deepEqual(verbs, Array(3).fill([...VOTE, 'evalsha']))
  for (const look of [locks, peer]) {
    const info = await look.inspect('told')
    assert.equal(info.fencingToken, lock.fencingToken)
    assert.equal(info.holder.pid, process.pid)
    assert.deepEqual((await look.list({ prefix: 'told' })).map(({ fencingToken }) => fencingToken), [lock.fencingToken])
  }
  for (const other of others) {
    const [fence] = (await other.get('holdfast:fence:{lock:told}')).split(' ')
    assert.equal(BigInt(fence), lock.fencingToken)
  }
  assert.equal(await lock.release(), true)
  await free()
})

test('whoever looks right after a grant is told of it', async () => {
  for (let i = 0; i < 50; i++) {
    const lock = await locks.acquire('seen')
    const info = await (i % 2 ? peer : locks).inspect('seen')
    assert.equal(info.fencingToken, lock.fencingToken)
    assert.equal(info.holder.pid, process.pid)
    assert.equal(await lock.release(), true)
  }
})

test('nothing but counters stays, and no more of them than there are', async () => {
  await free()
  for (const other of others) await other.flushall()
  await Promise.all(Array.from({ length: 3000 }, (_, i) => locks.using(`one-time:${i}`, () => {})))
  await free()
  for (const found of await keys()) {
    // What was held when the event loop slept leaves a mark that it was released.
    const counters = found.filter((key) => !key.startsWith('holdfast:fence:'))
    assert.ok(counters.length > 900 && counters.length <= 1024, `${counters.length}`)
    for (const key of counters) assert.ok(Number(COUNTER.exec(key)?.[1]) < 1024, key)
  }
})

test('tokens grow from plain commands to scripts and back, from process to process, and no two are the same', async () => {
  const tokens = []
  for (let i = 0; i < 60; i++) {
    // Metadata, and several names, are for the script.
    for (const options of [{}, { metadata: i }, {}]) {
      const names = options.metadata % 3 === 0 ? ['grow', 'too'] : 'grow'
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

test('a counter that is ahead of the clocks decides', async () => {
  const lock = await locks.acquire('ahead')
  await lock.release()
  await free()
  const ahead = 4_000_000_000_000_000n
  for (const other of others.slice(1)) {
    for (const key of await other.keys('holdfast:last:*')) await other.zadd(key, 'GT', ahead, 'last')
  }
  for (let i = 1n; i <= 3n; i++) {
    const next = await (i % 2n ? peer : locks).acquire('ahead')
    assert.equal(next.fencingToken, ahead + i)
    await next.release()
    await free()
  }
  for (const other of others) await other.flushall()
})

test('a busy name is not tried for by plain commands again, and is left as it is', async () => {
  const held = await peer.acquire('busy')
  await locks.inspect('busy')
  const first = await heard(1, () => locks.acquireLock('busy'))
  assert.equal(first.result, false)
  const second = await heard(1, () => locks.acquireLock('busy'))
  assert.equal(second.result, false)
  for (const verbs of second.verbs) assert.deepEqual(verbs, ['evalsha'])
  assert.equal((await locks.inspect('busy')).fencingToken, held.fencingToken)
  assert.equal(await held.release(), true)
  await free()
})

test('a release right behind a vote that is late takes that back, and nothing else has to', async () => {
  const { verbs } = await heard(5, async () => {
    await others[2].client('PAUSE', 300, 'WRITE')
    for (let i = 0; i < 20; i++) {
      assert.equal(await locks.acquireLock(`late:${i}`), true)
      assert.equal(await locks.releaseLock(`late:${i}`), true)
    }
    await until('the late ones', async () => (await others[2].keys('lock:late:*')).length === 0)
    await sleep(400)
  })
  await free()
  const scripts = verbs[2].filter((verb) => verb === 'evalsha').length
  assert.equal(scripts, 20, `${verbs[2]}`)
})

test('a node that forgets its scripts, or breaks its connections, costs no lock', async () => {
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

/** A service that reaches some nodes through proxies, which hand what it sends to `pass`. */
async function behindProxies(t, some, pass) {
  const open = some.map(({ port }) => {
    const proxy = createServer((client) => {
      const server = connect(port, '127.0.0.1')
      for (const socket of [client, server]) socket.setNoDelay(true).on('error', () => {})
      server.pipe(client)
      client.on('close', () => server.destroy())
      client.on('data', (data) => pass(data, server, client))
    })
    t.after(() => proxy.close())
    return new Promise((resolve) => proxy.listen(0, '127.0.0.1', () => resolve(proxy.address().port)))
  })
  const ports = [...(await Promise.all(open)), ...nodes.slice(some.length).map((node) => node.port)]
  const service = await LockService.connect(ports.map((port) => `redis://127.0.0.1:${port}`))
  t.after(() => service.close())
  return service
}

test('a vote that was taken and cannot be counted is taken back', async () => {
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

test('a vote that was long on its way goes by the clock of the node', async (t) => {
  let reachedAt
  const ours = await behindProxies(t, nodes, (data, server) => {
    if (!data.includes('ZADD') || !data.includes('lock:slow')) return server.write(data)
    setTimeout(() => {
      reachedAt ??= Date.now()
      server.write(data)
    }, 150)
  })
  const lock = await ours.acquire('slow')
  // No sooner than what the nodes' clocks may differ by.
  assert.ok(lock.fencingToken >= BigInt(reachedAt - 100) * 1000n, `${lock.fencingToken} at ${reachedAt}`)
  assert.equal((await peer.inspect('slow')).fencingToken, lock.fencingToken)
  assert.equal(await lock.release(), true)
  await free()
})

test('a holder that is displaced in the middle of its votes is not granted the lock', async (t) => {
  // Two nodes get the commands one by one, and somebody frees the name in between.
  const stopped = []
  const ours = await behindProxies(t, nodes.slice(0, 2), (data, server, client) => {
    const at = data.indexOf('*6\r\n$4\r\nZADD')
    if (at < 0 || stopped.length === 2 || !data.includes('lock:between')) return server.write(data)
    server.write(data.subarray(0, at))
    client.pause()
    stopped.push(() => {
      server.write(data.subarray(at))
      client.resume()
    })
  })
  await ours.acquireLock('probe')
  const call = ours.tryAcquire('between')
  await until('both in the middle', () => stopped.length === 2)
  // Has the votes of two nodes, whose answers it does not know yet.
  await until('both taken', async () => (await Promise.all(others.map((other) => other.get('lock:between')))).every(Boolean))
  assert.equal(await peer.forceRelease('between'), true)
  const holder = await peer.acquire('between')
  for (const goOn of stopped) goOn()
  assert.equal(await call, null)
  assert.equal(holder.isHeld, true)
  assert.equal((await peer.inspect('between')).fencingToken, holder.fencingToken)
  assert.equal(await holder.release(), true)
  await ours.releaseLock('probe')
  await free()
})

test('calls of one tick are served in order', async () => {
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
