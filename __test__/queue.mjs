// The queue of a store between real processes: who is served when, and who holds nobody up.
import assert from 'node:assert/strict'
import { Worker } from 'node:worker_threads'
import { WaiterProcesses, named, suspend } from './waiter-processes.mjs'
import { suite } from './stores.mjs'
import { rejects, sleep, SOON_MS, until, waiting } from './tools.mjs'

/** How long a waiter that stands still may keep a name that it was handed, and what a busy machine may add. */
const STANDSTILL_MS = 2000 + SOON_MS

const crowd = (t, store) => new WaiterProcesses(t, { url: store.target, options: store.options })

/** The cases that every store with a queue passes whose processes meet in a server. */
export function queue(kind) {
  suite(kind, 'the order of waiters', (test) => {
    test('4 processes × 25 waiters are served in the order of their arrival', async (store, t) => {
      const locks = await store.connect()
      const all = crowd(t, store)
      const held = await locks.acquire('n')
      const children = await all.processes(4)
      const expected = []
      for (let index = 0; index < 100; index++) {
        // Now and then twice in a row, so that neighbours are of one process as well as of two.
        const letter = Math.floor(index / (index % 3 === 0 ? 2 : 1)) % 4
        expected.push(`${letter}-${index}`)
        await all.enqueue(children[letter], `${letter}-${index}`)
      }
      assert.equal(await held.release(), true)
      await all.serves(expected)
      await all.isOver()
    })

    test('a process with 200 waiters and one with 1 take turns by arrival, not by process', async (store, t) => {
      const locks = await store.connect()
      const all = crowd(t, store)
      const held = await locks.acquire('n')
      const [many, single] = await all.processes(2)
      const expected = [...named('m', 70), 's0', ...named('m', 200).slice(70)]
      for (const as of expected) await all.enqueue(as[0] === 'm' ? many : single, as)
      assert.equal(await held.release(), true)
      // Its next waiter comes while the others are served: behind them all.
      await single.next('served')
      single.send(JSON.stringify({ verb: 'wait', as: 's1', name: 'n' }))
      await all.serves([...expected, 's1'])
      await all.isOver()
    })

    test('neither a single try nor another tool’s ever passes the queue', async (store, t) => {
      const [locks, passer] = await store.connectAll(2)
      const all = crowd(t, store)
      const held = await locks.acquire('n')
      const children = await all.processes(2)
      const expected = named('w', 40)
      for (const [index, as] of expected.entries()) await all.enqueue(children[index % 2], as)
      let tries = 0
      const passing = async (attempt) => {
        for (; (await all.served()).length < expected.length; tries++) {
          const free = await attempt()
          if (free === null) continue
          // Whoever gets it has to be the last one.
          assert.deepEqual(await all.served(), expected)
          return free()
        }
      }
      const ours = async (service) => {
        const lock = await service.tryAcquire('n')
        return lock && (() => lock.release())
      }
      const theirs = async () => ((await all.ledger.takes('n')) ? () => all.ledger.frees('n') : null)
      const over = Promise.all([passing(() => ours(locks)), passing(() => ours(passer)), passing(theirs)])
      assert.equal(await held.release(), true)
      await all.serves(expected)
      await over
      assert.ok(tries > 30, `only ${tries} tries`)
    })

    test('waiters in worker threads are as good as processes', async (store, t) => {
      const locks = await store.connect()
      const held = await locks.acquire('n')
      const task = JSON.stringify({ url: store.target, options: store.options })
      const threads = Array.from({ length: 3 }, () => new Worker(new URL('children/waiter-thread.mjs', import.meta.url), { argv: [task] }))
      t.after(() => Promise.all(threads.map((thread) => thread.terminate())))
      const [served, places] = [[], []]
      let ready = 0
      for (const thread of threads) {
        thread.on('message', (told) => {
          if (told.ready) ready++
          if (told.waiting) places.push(thread)
          if (told.served) served.push(told.served)
        })
      }
      await until('the threads are ready', () => ready === threads.length)
      for (let index = 0; index < 12; index++) {
        threads[index % 3].postMessage(index)
        await until('it waits', () => places.length === index + 1)
      }
      // The first of them ends in the middle of its waiting: those behind it are not held up for long.
      await threads[0].terminate()
      assert.equal(await held.release(), true)
      const expected = Array.from({ length: 12 }, (_, index) => index).filter((index) => index % 3 !== 0)
      await until('all are served', () => served.length === expected.length)
      served.sort((one, other) => (BigInt(one.fence) < BigInt(other.fence) ? -1 : 1))
      assert.deepEqual(served.map(({ as }) => as), expected)
    })
  })

  suite(kind, 'waiters that drop out', (test) => {
    /** A holder, and processes whose waiters stand in line in the given order: `a0` is of the first process. */
    async function line(t, store, order) {
      const locks = await store.connect()
      const all = crowd(t, store)
      const held = await locks.acquire('n', { ttlMs: 60_000 })
      const letters = [...new Set(order.map(([letter]) => letter))]
      const children = await all.processes(letters.length)
      const by = Object.fromEntries(letters.map((letter, index) => [letter, children[index]]))
      for (const as of order) await all.enqueue(by[as[0]], as)
      return { all, by, held, locks }
    }

    test('a killed process holds nobody up, wherever its waiters stand', async (store, t) => {
      const order = [...named('a', 10), 'b0', 'a10', 'c0', 'b1', 'a11']
      const { all, by, held } = await line(t, store, order)
      by.a.kill('SIGKILL')
      await by.a.ended
      const releasedAt = performance.now()
      assert.equal(await held.release(), true)
      await all.serves(['b0', 'c0', 'b1'])
      // Far less than the leases of 60 s that were asked for.
      const tookMs = performance.now() - releasedAt
      assert.ok(tookMs < STANDSTILL_MS, `it took ${tookMs} ms`)
    })

    test('a process killed with the name in its hands costs its lease, and no more', async (store, t) => {
      const { all, by, held } = await line(t, store, named('b', 3))
      // It comes last, and its turn comes with a lease of 1 s.
      await all.enqueue(by.b, 'b3', { ttlMs: 1000, holdMs: 60_000 })
      const [heir] = await all.processes(1)
      await all.enqueue(heir, 'c0')
      assert.equal(await held.release(), true)
      await all.serves(['b0', 'b1', 'b2', 'b3'], { holds: true })
      by.b.kill('SIGKILL')
      await by.b.ended
      const killedAt = performance.now()
      await heir.next('served')
      assert.ok(performance.now() - killedAt < 1000 + SOON_MS)
      assert.ok((await all.served()).includes('c0'))
    })

    test('a stopped process is passed over, and comes back to its places', async (store, t) => {
      const order = [...named('a', 5), 'b0', 'c0']
      const { all, by, held } = await line(t, store, order.slice(0, 5))
      const [b, c] = await all.processes(2)
      await all.enqueue(b, 'b0', { holdMs: 4000 })
      await all.enqueue(c, 'c0')
      await suspend(by.a)
      const releasedAt = performance.now()
      assert.equal(await held.release(), true)
      await until('the next live one is served', async () => (await all.served()).length > 0)
      const tookMs = performance.now() - releasedAt
      // Once for the process, and not once for each of its waiters.
      assert.ok(tookMs < STANDSTILL_MS, `it took ${tookMs} ms`)
      // While that one holds the name.
      by.a.kill('SIGCONT')
      await all.serves(['b0', ...named('a', 5), 'c0'])
      await all.isOver()
    })

    test('an aborted first waiter leaves at once', async (store, t) => {
      const { all, by, held } = await line(t, store, ['a0', 'b0', 'a1'])
      by.a.send(JSON.stringify({ verb: 'abort', as: 'a0' }))
      assert.deepEqual(await by.a.next('gaveUp'), { as: 'a0', code: 'enough' })
      await until('its place is gone', async () => (await all.places()).length === 2)
      const releasedAt = performance.now()
      assert.equal(await held.release(), true)
      await all.serves(['b0', 'a1'])
      assert.ok(performance.now() - releasedAt < SOON_MS)
      await all.isOver()
    })

    test('whoever gives up while the name is handed to it hands it on', async (store, t) => {
      const [locks, quitter] = await store.connectAll(2)
      const all = crowd(t, store)
      const [child] = await all.processes(1)
      let served = 0
      for (let round = 0; round < 30; round++) {
        const held = await locks.acquire('n', { ttlMs: 60_000 })
        const abort = new AbortController()
        const first = quitter.acquire('n', { ttlMs: 60_000, waitMs: 60_000, signal: abort.signal })
        const ended = first.then((lock) => lock.release(), (error) => assert.equal(error, abort.signal.reason))
        await waiting(quitter, 1)
        await all.enqueue(child, `${round}`)
        const releasedAt = performance.now()
        const released = held.release()
        for (const end = performance.now() + (round % 10) * 0.2; performance.now() < end; );
        abort.abort(new Error('enough'))
        assert.equal(await released, true)
        await ended
        await until('the second is served', async () => (await all.served()).length === ++served || !served--)
        assert.ok(performance.now() - releasedAt < SOON_MS, `round ${round}`)
      }
      await all.isOver()
    })

    test('a waiter whose time is up leaves', async (store, t) => {
      const { all, by, held } = await line(t, store, ['a0', 'b0'])
      const [c] = await all.processes(1)
      await all.enqueue(c, 'c0', { waitMs: 300 })
      await all.enqueue(by.a, 'a1')
      assert.deepEqual(await c.next('gaveUp'), { as: 'c0', code: 'LOCK_TIMEOUT' })
      await until('its place is gone', async () => (await all.places()).length === 3)
      assert.equal(await held.release(), true)
      await all.serves(['a0', 'b0', 'a1'])
      await all.isOver()
    })

    test('close() while waiting leaves no place behind', async (store) => {
      const [locks, leaving] = await store.connectAll(2)
      const all = crowd({ after: (end) => (store.alsoAtEnd = end) }, store)
      const held = await locks.acquire('n')
      const waits = named('w', 20).map(() => rejects(leaving.acquire('n', { waitMs: Infinity }), 'LOCK_CLOSED'))
      await waiting(leaving, 20)
      assert.equal((await all.places()).length, 20)
      await leaving.close()
      await Promise.all(waits)
      assert.deepEqual(await all.places(), [])
      assert.equal(await held.release(), true)
      assert.ok(await all.ledger.isOver('n'))
      await store.alsoAtEnd()
    })

    test('a waiter with a short ttl has no worse place', async (store, t) => {
      const { all, held } = await line(t, store, [])
      const [a, b] = await all.processes(2)
      await all.enqueue(a, 'a0', { ttlMs: 300 })
      await all.enqueue(b, 'b0')
      // Longer than its ttl, and shorter than its process's next sign of life.
      await sleep(700)
      assert.equal(await held.release(), true)
      await all.serves(['a0', 'b0'])
    })

    test('the queue of a killed holder moves at the end of its lease, in order', async (store, t) => {
      const ttlMs = 3000
      const all = crowd(t, store)
      const [holder, a, b] = await all.processes(3)
      holder.send(JSON.stringify({ verb: 'hold', name: 'n', ttlMs }))
      await holder.next('held')
      const order = ['a0', 'b0', 'b1', 'a1']
      for (const as of order) await all.enqueue(as[0] === 'a' ? a : b, as)
      // The lease is a renewed one by now.
      await sleep(ttlMs / 2)
      holder.kill('SIGKILL')
      await holder.ended
      const [left, at] = [await all.ledger.remainingMs('n'), performance.now()]
      assert.ok(left > 0)
      await all.serves(order)
      const tookMs = performance.now() - at
      assert.ok(tookMs < left + SOON_MS, `${tookMs} ms, of which the lease was ${left} ms`)
      assert.ok(tookMs > left - 100, `${tookMs} ms, of which the lease was ${left} ms`)
    })
  })
}
