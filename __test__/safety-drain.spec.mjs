// close({ drainMs }): jobs end and release their locks, new calls are rejected.
import assert from 'node:assert/strict'
import { start } from './children/start.mjs'
import { assertFree, block, rejection, rejects, sleep, SOON_MS, timed, until, waiting } from './tools.mjs'
import { KINDS, suite } from './stores.mjs'

for (const kind of ['memory', 'redis', 'mongodb', 'mongodb-replica-set']) {
  suite(kind, 'drain', (test) => {
    for (const options of [undefined, { drainMs: '60s' }]) {
      test(`calls in the tick after close(${options ? '{ drainMs }' : ''}) are rejected`, async (store) => {
        const [a] = await store.connectAll(1)
        const closing = a.close(options)
        const never = () => assert.fail('fn was called')
        const calls = [a.using('n', never), a.acquire('n'), a.acquireLock('n'), a.tryUsing('n', never)]
        for (const call of calls) await rejects(call, 'LOCK_CLOSED', { retryable: false })
        await closing
      })
    }

    test('jobs end under their locks, new calls are rejected at once, and waits end', async (store) => {
      const [a, b] = await store.connectAll(2)
      const theirs = await b.acquire('busy')
      const wait = rejects(a.acquire('busy', { waitMs: Infinity }), 'LOCK_CLOSED')
      await waiting(a, 1)
      const held = await a.acquire('held', { ttlMs: 4500 })
      assert.equal(await a.acquireLock('gist', 60), true)
      let finish
      const finished = new Promise((resolve) => (finish = resolve))
      const job = a.using('job', { ttlMs: 4500 }, async (lock) => {
        await finished
        return lock.isHeld && !lock.signal.aborted && (await b.tryAcquire('job')) === null
      })
      const skipping = a.tryUsing('try', { ttlMs: 4500 }, async () => (await finished, 'tried'))
      const gist = a.acquireAndExecute('execute', async () => (await finished, 'executed'))
      await until('five locks', () => a.stats().held === 5)

      let isClosed = false
      const closing = a.close({ drainMs: '60s' }).then(() => (isClosed = true))
      const never = () => assert.fail('fn was called')
      for (const call of [
        () => a.acquire('new'),
        () => a.tryAcquire('new'),
        () => a.acquireLock('new'),
        () => a.using('new', never),
        () => a.tryUsing('new', never),
        () => a.acquireAndExecute('new', never),
        () => a.inspect('job'),
        () => a.list(),
        () => a.ping(),
        () => a.forceRelease('job'),
        () => a.restore(theirs.transferable()),
      ]) {
        await rejects(call(), 'LOCK_CLOSED', { retryable: false })
      }
      await wait
      assert.equal(isClosed, false)
      // Longer than the ttl: the leases are renewed.
      await sleep(5500)
      assert.equal(held.isHeld, true)
      await held.extend(5000)
      assert.equal(await held.release(), true)
      assert.equal(await a.releaseLock('gist'), true)
      assert.equal(isClosed, false)
      finish()
      assert.equal(await job, true)
      assert.deepEqual(await skipping, { ran: true, value: 'tried' })
      assert.equal(await gist, 'executed')
      await closing
      assert.deepEqual([a.stats().lost, a.stats().held], [0, 0])
      assert.equal(await theirs.release(), true)
      for (const name of ['held', 'job', 'try', 'gist', 'execute', 'new']) await assertFree(b, name)
    })

    test('what is held at the end of the drain is aborted and released', async (store) => {
      const [a, b] = await store.connectAll(2)
      const lost = rejection(
        a.using('slow', async ({ signal }) => {
          await new Promise((resolve) => signal.addEventListener('abort', resolve))
          assert.equal(signal.reason.code, 'LOCK_LOST')
        }),
      )
      await until('the job', () => a.stats().held === 1)
      const took = await timed(a.close({ drainMs: 300 }))
      assert.ok(took >= 290, `${took} ms`)
      assert.equal((await lost).code, 'LOCK_LOST')
      await assertFree(b, 'slow')
    })

    test('a drain waits for a job that has lost its lock', async (store) => {
      const [a, b] = await store.connectAll(2)
      let finish
      const finished = new Promise((resolve) => (finish = resolve))
      const lost = rejection(
        a.using('job', async ({ signal }) => {
          const aborted = new Promise((resolve) => signal.addEventListener('abort', resolve))
          await b.forceRelease('job')
          await aborted
          await finished
        }),
      )
      const gist = a.acquireAndExecute('gist', 1.5, () => finished)
      await until('both leases have ended', () => a.stats().acquired === 2 && a.stats().held === 0, 30_000)
      let isClosed = false
      const closing = a.close({ drainMs: '60s' }).then(() => (isClosed = true))
      await sleep(300)
      assert.equal(isClosed, false)
      finish()
      assert.equal((await lost).code, 'LOCK_LOST')
      await gist
      await closing
    })

    test('a drain without an end to a job ends after its time', async (store) => {
      const [a] = await store.connectAll(1)
      let finish
      const gist = a.acquireAndExecute('gist', 1.5, () => new Promise((resolve) => (finish = resolve)))
      await until('the lease has ended', () => a.stats().acquired === 1 && a.stats().held === 0)
      await a.close({ drainMs: 300 })
      finish('done')
      assert.equal(await gist, 'done')
    })

    test('a close ends a drain, and a drain without locks ends at once', async (store) => {
      const [a, b, c] = await store.connectAll(3)
      assert.ok((await timed(b.close({ drainMs: 60_000 }))) < SOON_MS)
      const lock = await a.acquire('held')
      const closing = a.close({ drainMs: '1h' })
      await rejects(a.tryAcquire('other'), 'LOCK_CLOSED')
      assert.equal(lock.isHeld, true)
      await a.close()
      await closing
      assert.equal(lock.isHeld, false)
      assert.equal(lock.signal.reason.code, 'LOCK_LOST')
      await assertFree(c, 'held')
    })
  })
}

for (const kind of Object.keys(KINDS)) {
  suite(kind, 'the end of a job at a close', (test) => {
    for (const options of [undefined, { drainMs: 100 }]) {
      const close = `close(${options ? '{ drainMs }' : ''})`

      test(`${close}: signals abort, then the names are free, then the promise resolves`, async (store) => {
        const [a, b] = await store.connectAll(2, { storeTimeoutMs: 20_000 })
        const names = Array.from({ length: 8 }, (_, index) => `n${index}`)
        const order = []
        let running = 0
        const jobs = names.map((name) =>
          rejection(
            a.using(name, async (lock) => {
              running++
              await new Promise((resolve) => lock.signal.addEventListener('abort', resolve))
              assert.deepEqual([lock.isHeld, lock.signal.reason.code], [false, 'LOCK_LOST'])
              order.push(`${name} aborted`)
            }),
          ),
        )
        await until('the jobs', () => running === names.length)
        const waits = names.map(async (name) => {
          const lock = await b.acquire(name, { waitMs: '60s' })
          order.push(`${name} granted`)
          await lock.release()
        })
        await waiting(b, names.length)
        await a.close(options)
        order.push('closed')
        for (const job of jobs) assert.equal((await job).code, 'LOCK_LOST')
        await Promise.all(waits)
        for (const name of names) {
          const aborted = order.indexOf(`${name} aborted`)
          assert.ok(aborted < order.indexOf(`${name} granted`) && aborted < order.indexOf('closed'), order.join(', '))
        }
      })

      // A process of its own observes the grant while the event loop of the holder is blocked.
      if (kind === 'memory') continue
      test(`${close}: another process gets the name after the abort, also when the event loop is blocked`, async (store, t) => {
        const a = await store.connect()
        const lock = await a.acquire('n')
        let abortedAt
        lock.signal.addEventListener('abort', () => (abortedAt = process.hrtime.bigint()))
        const waiter = start(t, 'waiter', { url: store.target, options: store.options })
        await waiter.next('ready')
        waiter.send(JSON.stringify({ name: 'n' }))
        await waiter.next('waiting')
        const closing = a.close(options)
        block(600)
        await closing
        assert.ok(abortedAt !== undefined)
        const { at } = await waiter.next('served')
        assert.ok(
          BigInt(at) > abortedAt,
          `granted ${(Number(abortedAt - BigInt(at)) / 1e6).toFixed(1)} ms before the abort`,
        )
        await waiter.endInput()
      })
    }
  })
}
