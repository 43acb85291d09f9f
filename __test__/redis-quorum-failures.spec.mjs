// The connections to the nodes of a quorum, through TLS: pairs, a broken connection, a node that hangs, a node that is killed.
import assert from 'node:assert/strict'
import { it } from 'node:test'
import { LockService } from '../index.js'
import { redisTls } from '../scripts/certificates.mjs'
import { locateRedis } from '../scripts/servers.mjs'
import { startRedisQuorum } from '../scripts/topologies.mjs'
import { killConnection, pair, startLoad, untilConnected } from './redis-load.mjs'
import { canStartServer } from './stores.mjs'
import { assertGrowing, later, rejects, until } from './tools.mjs'

const TIMEOUT_MS = 120_000

it('a quorum through TLS tolerates a node that hangs and one that is killed', { timeout: TIMEOUT_MS }, async (t) => {
  if (!(await canStartServer(t, 'redis-quorum', locateRedis))) return
  const tls = await redisTls()
  const quorum = await startRedisQuorum({ tls })
  const { nodes } = quorum
  const urls = nodes.map(({ tlsPort }) => `rediss://127.0.0.1:${tlsPort}`)
  const connect = () => LockService.connect(urls, { tls: { caFile: tls.caFile }, storeTimeoutMs: 4000 })
  const locks = await connect()
  let peer = locks
  try {
    const warm = (servers = nodes) => untilConnected(servers, () => pair(locks, 'warm'))
    await warm()

    // Many names at once.
    const names = Array.from({ length: 200 }, (_, i) => `n${i}`)
    const taken = await Promise.all(names.map((name) => locks.tryAcquire(name)))
    assert.ok(taken.every((lock, i) => lock?.name === names[i]))
    assert.ok((await Promise.all(taken.map((lock) => lock?.release()))).every(Boolean))

    // A broken connection.
    const calls = Array.from({ length: 20 }, (_, i) => locks.tryAcquire(`n${i}`))
    await killConnection(nodes[0])
    for (const lock of await Promise.all(calls)) assert.equal(await lock?.release(), true)
    await warm()

    // From here on there are two connections to each node.
    peer = await connect()
    const held = await locks.acquire('held', { ttlMs: 20_000 })
    // Each service has names of its own: while a node hangs, two attempts for one name that split the votes wait for it.
    const startBoth = () => [startLoad([locks], ['x', 'y', 'z']), startLoad([peer], ['u', 'v', 'w'])]
    /** Waits until both services were served again. */
    const continues = async (what, loads) => {
      const before = loads.map(({ counts }) => counts.served)
      await until(what, () => loads.every(({ counts }, i) => counts.served > before[i] + 50))
    }
    const [first, second, third] = nodes

    // One node hangs: the majority decides.
    await first.pause()
    let loads = startBoth()
    await continues('calls while a node hangs', loads)
    await held.extend(20_000)
    assert.equal(await peer.tryAcquire('held'), null)
    // Two nodes hang: calls reject.
    await second.pause()
    await rejects(later(locks.tryAcquire('no majority')), 'LOCK_STORE', { retryable: true, engine: 'redis' })
    second.resume()
    first.resume()
    await continues('calls with all nodes', loads)
    await Promise.all(loads.map((load) => load.stop()))
    await peer.close()
    await warm()

    // One node is killed, and comes back empty.
    peer = await connect()
    loads = startBoth()
    await continues('a load', loads)
    await third.kill()
    await continues('calls without the node', loads)
    assert.equal(held.isHeld, true)
    await third.restart()
    await continues('calls with the empty node', loads)
    await Promise.all(loads.map((load) => load.stop()))
    await peer.close()
    await warm()
    await held.extend(20_000)
    assert.equal(await held.release(), true)
    const next = await locks.acquire('held')
    assertGrowing([held.fencingToken, next.fencingToken])
    assert.equal(await next.release(), true)
    await until('nothing is left', async () => (await locks.list()).length === 0)
  } finally {
    for (const node of nodes) node.resume()
    await Promise.all([locks.close(), peer.close()])
    await quorum.stop()
    await tls.remove()
  }
})
