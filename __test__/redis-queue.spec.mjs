// The queue in Redis.
import assert from 'node:assert/strict'
import { WaiterProcesses, labels } from './waiter-processes.mjs'
import { proxySuite } from './proxy.mjs'
import { queue } from './suites/queue.mjs'
import { rejects, until } from './tools.mjs'

queue('redis')

proxySuite('redis', 'a flushed store', { serverPerTest: true }, (test) => {
  test('all waiters are served one at a time after FLUSHALL', async ({ server, direct, options }, t) => {
    const waiters = new WaiterProcesses(t, { url: server.url, options })
    const held = await direct.acquire('n', { ttlMs: 60_000 })
    const children = await waiters.processes(4)
    const expected = labels('w', 40)
    for (const [index, label] of expected.entries()) await waiters.enqueue(children[index % 4], label, { holdMs: 1 })
    await waiters.redis.redis.flushall()
    await until('all waiters are served', async () => (await waiters.served()).length >= expected.length)
    assert.deepEqual((await waiters.served()).toSorted(), expected.toSorted())
    await rejects(held.extend(60_000), 'LOCK_LOST')
    await waiters.assertUnused()
  })
})
