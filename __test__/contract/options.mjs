// Every option of acquire, and the defaults of a service.
import assert from 'node:assert/strict'
import { once } from 'node:events'
import { Worker } from 'node:worker_threads'
import { assertLockError, rejects, sleep, until } from '../tools.mjs'

export function options(test) {
  test('the defaults are a ttl of 30 s and renewal', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('default', undefined)
    const { remainingMs } = await b.inspect('default')
    const longest = store.lasting(30_000)
    assert.ok(remainingMs > longest * 0.66 && remainingMs <= longest, `${remainingMs} ms`)
    assert.deepEqual([lock.transferable().ttlMs, lock.transferable().renew], [30_000, true])
    const other = await b.tryAcquire('other', { ttlMs: undefined, renew: undefined, metadata: undefined })
    assert.deepEqual([other.transferable().ttlMs, other.transferable().renew], [30_000, true])
    assert.equal(await lock.release(), true)
  })

  test('a renewed lease outlives its ttl', async (store) => {
    const [a, b] = await store.connectAll(2)
    const locks = [await a.acquire('kept', { ttlMs: 3500 }), await a.tryAcquire('tried', { ttlMs: 3500, renew: true })]
    const end = Date.now() + 5000
    while (Date.now() < end) {
      assert.equal(await b.tryAcquire('kept'), null)
      assert.equal(await b.tryAcquire('tried'), null)
      await sleep(40)
    }
    for (const lock of locks) {
      assert.equal(lock.isHeld, true)
      assert.equal(await lock.release(), true)
    }
    assert.ok(a.stats().renewed >= 2)
    assert.equal(a.stats().lost, 0)
  })

  test('a lease with renew: false ends after its ttl', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('ends', { ttlMs: 400, renew: false })
    const next = await b.acquire('ends', { waitMs: 10_000 })
    assert.equal(lock.isHeld, false)
    assert.equal(a.stats().renewed, 0)
    assert.equal(await lock.release(), false)
    assert.equal(await next.release(), true)
  })

  test('a renewal never re-creates a lock that was removed from the store', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('removed', { ttlMs: 3000 })
    assert.equal(await b.forceRelease('removed'), true)
    const { renewed } = a.stats()
    await until('the loss', () => !lock.isHeld)
    await sleep(300)
    assert.equal(await b.inspect('removed'), null)
    assert.equal(a.stats().renewed, renewed)
  })

  test('maxHoldMs ends a renewed lease', async (store) => {
    const [a, b] = await store.connectAll(2)
    const began = performance.now()
    const lock = await a.acquire('most', { ttlMs: 4500, maxHoldMs: 6000 })
    const lost = once(lock.signal, 'abort')
    await b.acquire('most', { waitMs: 20_000 })
    // The lease counts from the sending of the request, a little before `acquire` resolved.
    assert.ok(performance.now() - began >= 5800, 'ended too early')
    await lost
    assertLockError(lock.signal.reason, 'LOCK_LOST', { key: 'most' })
    assert.match(lock.signal.reason.message, /maxHoldMs/)
    assert.equal(await lock.release(), false)
    await rejects(lock.extend(60_000), 'LOCK_LOST')
  })

  test('maxHoldMs limits the ttl and the time that extend sets', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('most', { ttlMs: 60_000, maxHoldMs: 5000 })
    assert.ok(lock.remainingMs <= 5000, `${lock.remainingMs} ms`)
    await lock.extend(60_000)
    assert.ok(lock.remainingMs <= 5000, `${lock.remainingMs} ms`)
    assert.ok((await b.inspect('most')).remainingMs <= store.lasting(5000))
    assert.equal(await lock.release(), true)
  })

  /** Starts a worker that holds `stalled` with a blocked event loop until `open()` is called. */
  async function stall(store, acquire, body) {
    const gate = new Int32Array(new SharedArrayBuffer(4))
    const workerData = { target: store.target, connect: store.options, acquire, gate }
    const worker = new Worker(new URL('stall-worker.mjs', import.meta.url), { workerData })
    const exited = once(worker, 'exit')
    try {
      const [held] = await once(worker, 'message')
      assert.equal(held, 'held')
      const result = once(worker, 'message')
      const open = async () => {
        Atomics.store(gate, 0, 1)
        Atomics.notify(gate, 0)
        return (await result)[0]
      }
      await body(open)
      const [code] = await exited
      assert.equal(code, 0)
    } finally {
      await worker.terminate()
    }
  }

  test('renewal continues while the event loop is blocked', async (store) => {
    const b = await store.connect()
    await stall(store, { ttlMs: 3500 }, async (open) => {
      const end = Date.now() + 6000
      while (Date.now() < end) {
        assert.equal(await b.tryAcquire('stalled'), null)
        await sleep(40)
      }
      assert.deepEqual(await open(), { isHeld: true, isAborted: false })
    })
  })

  test('renewal stops when the event loop has not responded for stallLimitMs', async (store) => {
    const b = await store.connect()
    await stall(store, { ttlMs: 900, stallLimitMs: 700 }, async (open) => {
      const lock = await b.acquire('stalled', { waitMs: 30_000 })
      assert.deepEqual(await open(), { isHeld: false, isAborted: true })
      assert.equal(lock.isHeld, true)
      assert.equal(await lock.release(), true)
    })
  })

  test('metadata is stored with the lock', async (store) => {
    const [a, b] = await store.connectAll(2)
    const values = [
      { job: 'report', nested: { list: [1, 2.5, -0, true, null, 'ä"\\\n'] } },
      'text',
      '',
      0,
      1.5,
      false,
      true,
      [],
      {},
      ['鎖🔒', '$where', 'a.b', { $set: 1, 'a.b': 2 }],
      'm'.repeat(16_382),
      'a lone surrogate: \ud800',
      'a NUL: \0',
    ]
    for (const [i, metadata] of values.entries()) {
      const lock = await a.acquire(`meta:${i}`, { metadata })
      assert.deepEqual((await b.inspect(`meta:${i}`)).metadata, JSON.parse(JSON.stringify(metadata)))
      assert.deepEqual(lock.transferable().metadata, JSON.parse(JSON.stringify(metadata)))
    }
    const all = await b.list({ prefix: 'meta:' })
    assert.equal(all.length, values.length)
    const without = await a.acquire('none', { metadata: null })
    assert.equal((await b.inspect('none')).metadata, null)
    assert.equal('metadata' in without.transferable(), false)
  })

  test('metadata ends with its lock', async (store) => {
    const [a, b] = await store.connectAll(2)
    await (await a.acquire('next', { metadata: 'first' })).release()
    await a.acquire('next', { ttlMs: 100, renew: false, metadata: 'second' })
    const lock = await b.acquire('next', { waitMs: 10_000 })
    assert.equal((await a.inspect('next')).metadata, null)
    assert.equal(await lock.release(), true)
  })

  test('the defaults of a service apply where a call has no option', async (store) => {
    const defaults = { ttlMs: 20_000, waitMs: 60, renew: false, minHoldMs: 0, maxHoldMs: 60_000, stallLimitMs: 60_000 }
    const [a, b] = [await store.connect({ defaults }), await store.connect()]
    const lock = await a.acquire('defaults')
    assert.deepEqual([lock.transferable().ttlMs, lock.transferable().renew], [20_000, false])
    assert.ok((await b.inspect('defaults')).remainingMs <= store.lasting(20_000))
    const short = rejects(a.acquire('defaults'), 'LOCK_TIMEOUT')
    await rejects(
      a.using('defaults', () => assert.fail('fn was called')),
      'LOCK_TIMEOUT',
    )
    assert.match((await short).message, /60 ms/)
    const own = await a.acquire('own', { ttlMs: 40_000, renew: true })
    assert.deepEqual([own.transferable().ttlMs, own.transferable().renew], [40_000, true])
    assert.ok((await b.inspect('own')).remainingMs > store.lasting(40_000) * 0.6)
    // The gist's functions ignore the defaults of waitMs and renew.
    const eager = await store.connect({ defaults: { ttlMs: 20_000, waitMs: 60_000, renew: true } })
    assert.equal(await eager.acquireLock('defaults'), false)
    assert.equal(await eager.acquireAndExecute('defaults', () => 'ran'), undefined)
    assert.equal(await eager.acquireLock('gist'), true)
    assert.ok((await b.inspect('gist')).remainingMs <= store.lasting(20_000))
    await eager.acquireAndExecute('job', async (held) => {
      assert.equal(held.transferable().renew, false)
      assert.ok((await b.inspect('job')).remainingMs <= store.lasting(20_000))
    })
  })

  test('the default of maxHoldMs applies to every function that acquires', async (store) => {
    store.mayLeaveLocks = true
    const b = await store.connect()
    const short = await store.connect({ defaults: { maxHoldMs: 3000 } })
    assert.equal(await short.acquireLock('most', 60), true)
    assert.ok((await b.inspect('most')).remainingMs <= store.lasting(3000))
  })

  test('a keyPrefix of more than 512 bytes is refused', async (store) => {
    const prefix = (bytes) => (store.options.keyPrefix ?? '').padEnd(bytes, 'x')
    const error = await rejects(store.connect({ keyPrefix: prefix(513) }), 'LOCK_INVALID_ARGUMENT')
    assert.match(error.message, /^keyPrefix must be at most 512 bytes, got 513 bytes/)
    const locks = await store.connect({ keyPrefix: prefix(512) })
    assert.equal(await locks.using('n'.repeat(512), () => 'held'), 'held')
  })

  test('the same name under two keyPrefix values is two locks', async (store) => {
    const prefix = store.options.keyPrefix ?? ''
    const a = await store.connect({ keyPrefix: `${prefix}one:` })
    const [b, c] = await store.connectAll(2, { keyPrefix: `${prefix}two:` })
    const [first, second] = [await a.acquire('same'), await b.acquire('same', { waitMs: 0 })]
    assert.equal(await c.tryAcquire('same'), null)
    for (const [service, lock] of [
      [a, first],
      [b, second],
    ]) {
      const all = await service.list()
      assert.deepEqual(
        all.map((info) => info.name),
        ['same'],
      )
      assert.equal(all[0].fencingToken, lock.fencingToken)
    }
    assert.equal(await first.release(), true)
    assert.equal((await c.inspect('same')).name, 'same')
    assert.equal(await second.release(), true)
  })
}
