// The queue in Redis.
import assert from 'node:assert/strict'
import { WaiterProcesses, named } from './waiter-processes.mjs'
import { proxySuite } from './proxy.mjs'
import { queue } from './queue.mjs'
import { rejects, until } from './tools.mjs'

queue('redis')

proxySuite('redis', 'a store that is emptied', { serverPerTest: true }, (test) => {
  test('FLUSHALL while waiting: everybody is served, one at a time', async ({ server, direct, options }, t) => {
    const all = new WaiterProcesses(t, { url: server.url, options })
    const held = await direct.acquire('n', { ttlMs: 60_000 })
    const children = await all.processes(4)
    const expected = named('w', 40)
    for (const [index, as] of expected.entries()) await all.enqueue(children[index % 4], as, { holdMs: 1 })
    await all.ledger.redis.flushall()
    await until('everybody is served', async () => (await all.served()).length >= expected.length)
    assert.deepEqual((await all.served()).toSorted(), expected.toSorted())
    await rejects(held.extend(60_000), 'LOCK_LOST')
    await all.isOver()
  })
})
