// The queue of a store between processes: the order of waiters, and waiters that are aborted, suspended or killed.
import assert from 'node:assert/strict'
import { Worker } from 'node:worker_threads'
import { WaiterProcesses, labels, suspend } from '../waiter-processes.mjs'
import { KINDS, suite } from '../stores.mjs'
import { block, inspectHeld, rejects, sleep, SOON_MS, stopwatch, until, waiting } from '../tools.mjs'

/**
 * The longest time for which the waiters of a dead or suspended process may delay the others, plus slack: from its last heartbeat until
 * it counts as dead, and no hand-off lasts longer.
 */
const LONGEST_DELAY_MS = 4500 + SOON_MS

const waiterProcesses = (t, store) => new WaiterProcesses(t, { url: store.target, options: store.options })

/**
 * The cases for every server store whose queue has the waiters of all processes.
 *
 * @param {'redis' | 'mongodb-replica-set' | 'postgres' | 'mysql' | 'etcd' | 'zookeeper'} kind
 */
export function queue(kind) {
  const { deadMs = 0, losesPositions = false } = KINDS[kind]
  /** The longest time for which the waiters of a dead or suspended process may delay the others, plus slack. */
  const longestDelayMs = Math.max(LONGEST_DELAY_MS, deadMs + SOON_MS)
  suite(kind, 'the order of waiters', (test) => {
    test('4 processes × 10 waiters are served in the order of arrival', async (store, t) => {
      const locks = await store.connect()
      const waiters = waiterProcesses(t, store)
      const held = await locks.acquire('n')
      const children = await waiters.processes(4)
      const expected = []
      for (let index = 0; index < 40; index++) {
        // Sometimes twice in a row, so that neighbours belong to one process or to two.
        const letter = Math.floor(index / (index % 3 === 0 ? 2 : 1)) % 4
        expected.push(`${letter}-${index}`)
        await waiters.enqueue(children[letter], `${letter}-${index}`)
      }
      assert.equal(await held.release(), true)
      await waiters.assertServed(expected)
      await waiters.assertUnused()
    })

    test('the waiters of two processes are served in the order of arrival, whatever their numbers', async (store, t) => {
      const locks = await store.connect()
      const waiters = waiterProcesses(t, store)
      const held = await locks.acquire('n')
      const [many, single] = await waiters.processes(2)
      // More than the attempts of one batch.
      const expected = [...labels('m', 70), 's0', ...labels('m', 80).slice(70)]
      for (const label of expected) await waiters.enqueue(label[0] === 'm' ? many : single, label)
      assert.equal(await held.release(), true)
      // The next waiter of that process arrives while the others are served: it is the last one.
      await single.next('served')
      single.send(JSON.stringify({ verb: 'wait', label: 's1', name: 'n' }))
      await waiters.assertServed([...expected, 's1'])
      await waiters.assertUnused()
    })

    test('neither tryAcquire nor another tool overtakes the queue', async (store, t) => {
      const [locks, other] = await store.connectAll(2)
      const waiters = waiterProcesses(t, store)
      const held = await locks.acquire('n')
      const children = await waiters.processes(2)
      const expected = labels('w', 20)
      // The first waiter holds the name for many tries, each other one for a few.
      const enough = 30
      for (const [index, label] of expected.entries())
        await waiters.enqueue(children[index % 2], label, index === 0 ? { holds: true } : { holdMs: 25 })
      let tries = 0
      const overtake = async (attempt) => {
        for (; (await waiters.served()).length < expected.length; tries++) {
          const free = await attempt()
          if (free === null) continue
          // Granted only after the last waiter.
          assert.deepEqual(await waiters.served(), expected)
          return free()
        }
      }
      const ours = async (service) => {
        const lock = await service.tryAcquire('n')
        return lock && (() => lock.release())
      }
      const theirs = async () => ((await waiters.recorder.acquire('n')) ? () => waiters.recorder.release('n') : null)
      const attempts = Promise.all([overtake(() => ours(locks)), overtake(() => ours(other)), overtake(theirs)])
      assert.equal(await held.release(), true)
      await until('tries', () => tries > enough)
      children[0].send(JSON.stringify({ verb: 'end', label: expected[0] }))
      await waiters.assertServed(expected)
      await attempts
    })

    test('waiters in worker threads are served in the order of arrival', async (store, t) => {
      const locks = await store.connect()
      const held = await locks.acquire('n')
      const task = JSON.stringify({ url: store.target, options: store.options })
      const threads = Array.from(
        { length: 3 },
        () => new Worker(new URL('../children/waiter-thread.mjs', import.meta.url), { argv: [task] }),
      )
      t.after(() => Promise.all(threads.map((thread) => thread.terminate())))
      /** @type {[{ label: number, fence: string }[], Worker[]]} */
      const [served, positions] = [[], []]
      let ready = 0
      for (const thread of threads) {
        thread.on('message', (message) => {
          if (message.ready) ready++
          if (message.waiting) positions.push(thread)
          if (message.served) served.push(message.served)
        })
      }
      await until('the threads are ready', () => ready === threads.length)
      for (let index = 0; index < 12; index++) {
        threads[index % 3].postMessage(index)
        await until('the thread waits', () => positions.length === index + 1)
      }
      // The first thread ends while it waits: it delays the others only briefly.
      await threads[0].terminate()
      assert.equal(await held.release(), true)
      const expected = Array.from({ length: 12 }, (_, index) => index).filter((index) => index % 3 !== 0)
      await until('all are served', () => served.length === expected.length)
      served.sort((one, other) => (BigInt(one.fence) < BigInt(other.fence) ? -1 : 1))
      assert.deepEqual(
        served.map(({ label }) => label),
        expected,
      )
    })
  })

  suite(kind, 'waiters that disappear', (declare) => {
    const test = (name, body) =>
      declare(name, (store, t) => {
        store.useShortSessions()
        return body(store, t)
      })

    /** Starts a holder, and processes whose waiters queue in the given order: `a0` belongs to the first process. */
    async function startQueue(t, store, order) {
      const locks = await store.connect()
      const waiters = waiterProcesses(t, store)
      const held = await locks.acquire('n', { ttlMs: 60_000 })
      const letters = [...new Set(order.map(([letter]) => letter))]
      const children = await waiters.processes(letters.length)
      const by = Object.fromEntries(letters.map((letter, index) => [letter, children[index]]))
      for (const label of order) await waiters.enqueue(by[label[0]], label)
      return { waiters, by, held, locks }
    }

    test('the waiters of a killed process do not count after 5 s', async (store, t) => {
      const { by, held, locks } = await startQueue(t, store, labels('a', 2))
      assert.equal((await locks.inspect('n')).waiting, 2)
      by.a.kill('SIGKILL')
      await by.a.ended
      await until('no waiting call', async () => (await locks.inspect('n')).waiting === 0)
      assert.equal(await held.release(), true)
    })

    test('the waiters of a killed process do not block other waiters', async (store, t) => {
      const order = [...labels('a', 10), 'b0', 'a10', 'c0', 'b1', 'a11']
      const { waiters, by, held } = await startQueue(t, store, order)
      by.a.kill('SIGKILL')
      await by.a.ended
      const releasedAt = performance.now()
      assert.equal(await held.release(), true)
      await waiters.assertServed(['b0', 'c0', 'b1'])
      // Far less than the ttl of 60 s.
      const tookMs = performance.now() - releasedAt
      assert.ok(tookMs < longestDelayMs, `it took ${tookMs} ms`)
    })

    test('a process killed while it holds the name blocks the next waiter for its lease only', async (store, t) => {
      const { waiters, by, held } = await startQueue(t, store, labels('b', 3))
      const ttlMs = 4500
      await waiters.enqueue(by.b, 'b3', { ttlMs, holdMs: 60_000 })
      const [successor] = await waiters.processes(1)
      await waiters.enqueue(successor, 'c0')
      assert.equal(await held.release(), true)
      await waiters.assertServed(['b0', 'b1', 'b2', 'b3'], { holds: true })
      by.b.kill('SIGKILL')
      await by.b.ended
      const elapsedMs = stopwatch()
      await successor.next('served')
      assert.ok(elapsedMs() < Math.max(ttlMs, deadMs) + SOON_MS, `${elapsedMs()} ms`)
      assert.ok((await waiters.served()).includes('c0'))
    })

    test(`a suspended process is skipped, and ${losesPositions ? 'goes to the end' : 'keeps its positions'}`, async (store, t) => {
      const order = [...labels('a', 5), 'b0', 'c0']
      const { waiters, by, held, locks } = await startQueue(t, store, order.slice(0, 5))
      const [b, c] = await waiters.processes(2)
      await waiters.enqueue(b, 'b0', { holds: true })
      await waiters.enqueue(c, 'c0', { holds: true })
      await suspend(by.a)
      const releasedAt = performance.now()
      assert.equal(await held.release(), true)
      await until('the next live waiter is served', async () => (await waiters.served()).length > 0)
      const tookMs = performance.now() - releasedAt
      // One delay for the process, and none for each further waiter of it.
      assert.ok(tookMs < longestDelayMs, `it took ${tookMs} ms`)
      // While the first live waiter holds the name. On a machine that stands still, `b` may be skipped as well: then `b0` keeps its position.
      by.a.kill('SIGCONT')
      const [first, second] = (await waiters.served())[0] === 'c0' ? ['c0', 'b0'] : ['b0', 'c0']
      const suspended = labels('a', 5)
      await until(
        'its waiters wait again',
        async () => (await inspectHeld(locks, 'n')).waiting === suspended.length + 1,
      )
      b.send(JSON.stringify({ verb: 'end', label: 'b0' }))
      c.send(JSON.stringify({ verb: 'end', label: 'c0' }))
      await waiters.assertServed(losesPositions ? [first, second, ...suspended] : [first, ...suspended, second])
      await waiters.assertUnused()
    })

    test('an aborted first waiter leaves the queue at once', async (store, t) => {
      const { waiters, by, held } = await startQueue(t, store, ['a0', 'b0', 'a1'])
      by.a.send(JSON.stringify({ verb: 'abort', label: 'a0' }))
      assert.deepEqual(await by.a.next('failed'), { label: 'a0', code: 'enough' })
      await until('its position is removed', async () => (await waiters.positions()).length === 2)
      const releasedAt = performance.now()
      assert.equal(await held.release(), true)
      await waiters.assertServed(['b0', 'a1'])
      assert.ok(performance.now() - releasedAt < SOON_MS)
      await waiters.assertUnused()
    })

    test('a waiter that is aborted during the hand-off passes the name on', async (store, t) => {
      const [locks, aborting] = await store.connectAll(2)
      const waiters = waiterProcesses(t, store)
      const [child] = await waiters.processes(1)
      let served = 0
      for (let round = 0; round < 30; round++) {
        const held = await locks.acquire('n', { ttlMs: 60_000 })
        const abort = new AbortController()
        const first = aborting.acquire('n', { ttlMs: 60_000, waitMs: 60_000, signal: abort.signal })
        const ended = first.then(
          (lock) => lock.release(),
          (error) => assert.equal(error, abort.signal.reason),
        )
        await waiting(aborting, 1)
        await waiters.enqueue(child, `${round}`)
        const releasedAt = performance.now()
        const released = held.release()
        block((round % 10) * 0.2)
        abort.abort(new Error('enough'))
        assert.equal(await released, true)
        await ended
        await until('the second is served', async () => (await waiters.served()).length === ++served || !served--)
        assert.ok(performance.now() - releasedAt < SOON_MS, `round ${round}`)
      }
      await waiters.assertUnused()
    })

    test('a waiter that times out leaves the queue', async (store, t) => {
      const { waiters, by, held } = await startQueue(t, store, ['a0', 'b0'])
      const [c] = await waiters.processes(1)
      // Longer than the next enqueue takes, also when the machine stalls.
      await waiters.enqueue(c, 'c0', { waitMs: 3000 })
      await waiters.enqueue(by.a, 'a1')
      assert.deepEqual(await c.next('failed'), { label: 'c0', code: 'LOCK_TIMEOUT' })
      await until('its position is removed', async () => (await waiters.positions()).length === 3)
      assert.equal(await held.release(), true)
      await waiters.assertServed(['a0', 'b0', 'a1'])
      await waiters.assertUnused()
    })

    test('close() removes the positions of waiting calls', async (store) => {
      const [locks, closing] = await store.connectAll(2)
      const waiters = waiterProcesses({ after: (end) => (store.cleanUp = end) }, store)
      const held = await locks.acquire('n')
      const waits = labels('w', 20).map(() => rejects(closing.acquire('n', { waitMs: Infinity }), 'LOCK_CLOSED'))
      await waiting(closing, 20)
      assert.equal((await waiters.positions()).length, 20)
      await closing.close()
      await Promise.all(waits)
      assert.deepEqual(await waiters.positions(), [])
      assert.equal(await held.release(), true)
      assert.ok(await waiters.recorder.isUnused('n'))
      await store.cleanUp()
    })

    test('a waiter with a short ttl keeps its position', async (store, t) => {
      const { waiters, held } = await startQueue(t, store, [])
      const [a, b] = await waiters.processes(2)
      await waiters.enqueue(a, 'a0', { ttlMs: 1000 })
      await waiters.enqueue(b, 'b0')
      // Longer than its ttl, and shorter than the heartbeat interval.
      await sleep(1500)
      assert.equal(await held.release(), true)
      await waiters.assertServed(['a0', 'b0'])
    })

    test('waiters of a killed holder are served in order when its lease expires', async (store, t) => {
      const ttlMs = 4500
      const waiters = waiterProcesses(t, store)
      const [holder, a, b] = await waiters.processes(3)
      holder.send(JSON.stringify({ verb: 'hold', name: 'n', ttlMs }))
      await holder.next('held')
      const order = ['a0', 'b0', 'b1', 'a1']
      for (const label of order) await waiters.enqueue(label[0] === 'a' ? a : b, label)
      // By now the lease has been renewed.
      await sleep(ttlMs / 2)
      holder.kill('SIGKILL')
      await holder.ended
      const before = performance.now()
      const left = await waiters.recorder.remainingMs('n')
      const elapsedMs = stopwatch()
      assert.ok(left > 0)
      await waiters.assertServed(order)
      assert.ok(elapsedMs() < left + SOON_MS, `${elapsedMs()} ms, of which the lease was ${left} ms`)
      const tookMs = performance.now() - before
      assert.ok(tookMs > left - 100, `${tookMs} ms, of which the lease was ${left} ms`)
    })
  })
}
