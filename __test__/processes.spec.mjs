// The promises between real processes: what one of them does, or suffers, and what the others may count on.
import assert from 'node:assert/strict'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { start } from './children/start.mjs'
import { KINDS, suite } from './stores.mjs'
import { assertGrowing, sleep, until, waiting } from './tools.mjs'

/** What a child must know to use the store of a test. */
const taskFor = (store, more) => ({ url: store.target, options: store.options, ...more })

/** A wait whose end matters only if the test gets that far: what went wrong before is what it has to show. */
function later(promise) {
  promise.catch(() => {})
  return promise
}

/** A process must end by itself, and long before any lease would let it go. */
async function ends(child, { code = 0, signal = null } = {}) {
  const end = await Promise.race([child.ended, sleep(20_000, undefined, { ref: false })])
  assert.ok(end, `still there after 20 s; it said ${JSON.stringify(child.messages)} ${child.stderr}`)
  assert.deepEqual(end, { code, signal }, child.stderr)
  assert.deepEqual(child.messages.filter((message) => message.error ?? message.unhandled), [])
}

async function endsQuietly(child) {
  await ends(child)
  assert.equal(child.stderr, '')
}

/** Four processes add to counters that only the lock protects. */
async function addUp(t, store, { way, names, rounds, perRound }) {
  const folder = await mkdtemp(join(tmpdir(), 'holdfast-count-'))
  t.after(() => rm(folder, { recursive: true, force: true }))
  for (const name of names) await writeFile(join(folder, name), JSON.stringify({ count: 0, fence: '0' }))
  const task = taskFor(store, { way, names, rounds, folder })
  const children = Array.from({ length: 4 }, () => start(t, 'counter', task))
  for (const child of children) {
    assert.equal(await child.next('lost', 80_000), 0)
    await ends(child)
  }
  let sum = 0
  for (const name of names) sum += JSON.parse(await readFile(join(folder, name), 'utf8')).count
  assert.equal(sum, 4 * rounds * perRound)
}

for (const kind of ['sqlite', 'redis', 'redis-quorum', 'mongodb', 'mongodb-replica-set']) {
  suite(kind, 'leases between processes', (test) => {
    test('a blocked event loop keeps its lock', async (store, t) => {
      const ttlMs = 600
      const locks = await store.connect()
      const holder = start(t, 'hold', taskFor(store, { names: 'n', acquire: { ttlMs } }))
      const fence = BigInt(await holder.next('held'))
      const waiter = later(locks.acquire('n', { waitMs: 60_000 }))
      let [tries, wins, isOver] = [0, 0, false]
      const trying = (async () => {
        for (; !isOver; tries++) if (await locks.tryAcquire('n')) wins++
      })()

      holder.send(`block ${4 * ttlMs}`)
      const found = await holder.next('blocked')
      isOver = true
      await trying
      assert.deepEqual(found, { isHeld: true, aborted: false, lost: 0 })
      assert.equal(wins, 0)
      assert.ok(tries > 20, `only ${tries} tries`)

      // It was this lock that stood in the way, and nothing else.
      holder.send('release')
      assert.equal(await holder.next('released'), true)
      const lock = await waiter
      assert.ok(lock.fencingToken > fence)
      await lock.release()
    })

    test('the lock of a killed process is taken over within its ttl and a second', async (store, t) => {
      const ttlMs = 2000
      const locks = await store.connect()
      const holder = start(t, 'hold', taskFor(store, { names: ['n', 'm'], acquire: { ttlMs } }))
      const fence = BigInt(await holder.next('held'))
      // Long enough for the lease to be a renewed one.
      await sleep(ttlMs / 2)
      const waiters = ['n', 'm'].map((name) => later(locks.acquire(name, { waitMs: 60_000 })))
      await waiting(locks, 2)
      holder.kill('SIGKILL')
      const killedAt = performance.now()
      const taken = await Promise.all(waiters)
      const tookMs = performance.now() - killedAt
      assert.ok(tookMs < ttlMs + 1000, `it took ${tookMs} ms`)
      // Renewals come at a third of the ttl: nobody may have it much before the other two thirds are over.
      assert.ok(tookMs > ttlMs / 3, `it took ${tookMs} ms`)
      for (const lock of taken) {
        assert.ok(lock.fencingToken > fence)
        await lock.release()
      }
    })

    test('a killed waiter blocks nobody for longer than its ttl and a second', async (store, t) => {
      const ttlMs = 2000
      const locks = await store.connect()
      const held = await locks.acquire('n')
      const first = start(t, 'waiter', taskFor(store))
      await first.next('ready')
      first.send(JSON.stringify({ name: 'n', ttlMs }))
      assert.equal(await first.next('waiting'), 'n')
      const second = later(locks.acquire('n', { waitMs: 60_000 }))
      await waiting(locks, 1)
      first.kill('SIGKILL')
      await first.ended
      const releasedAt = performance.now()
      await held.release()
      const lock = await second
      const tookMs = performance.now() - releasedAt
      assert.ok(tookMs < ttlMs + 1000, `it took ${tookMs} ms`)
      await lock.release()
    })

    test('a process that was suspended past its ttl knows so in its first line', async (store, t) => {
      const ttlMs = 1500
      const locks = await store.connect()
      const variants = [
        { loop: 'interval', look: 'isHeld' },
        { loop: 'immediate', look: 'aborted' },
        { loop: 'microtasks', look: 'throwIfAborted' },
        { loop: 'busy', look: 'reason' },
      ]
      const children = variants.map((variant) => {
        const name = `${variant.loop}-${variant.look}`
        return { name, process: start(t, 'suspended', taskFor(store, { ...variant, name, ttlMs })) }
      })
      await Promise.all(
        children.map(async (child) => {
          child.fence = BigInt(await child.process.next('held'))
          child.process.kill('SIGSTOP')
        }),
      )
      const taken = await Promise.all(children.map(({ name }) => locks.acquire(name, { waitMs: 60_000 })))
      for (const child of children) child.process.kill('SIGCONT')
      for (const [index, child] of children.entries()) {
        assert.ok(taken[index].fencingToken > child.fence)
        const expected = { isHeld: false, aborted: true, code: 'LOCK_LOST', heard: 1, remainingMs: 0 }
        assert.deepEqual(await child.process.next('found'), expected, child.name)
        await endsQuietly(child.process)
        // Whatever the late process cleaned up, it was not its successor's.
        assert.equal((await locks.inspect(child.name)).fencingToken, taken[index].fencingToken)
        assert.equal(await taken[index].release(), true)
      }
    })
  })

  suite(kind, 'contention between processes', (test) => {
    test('an unprotected counter adds up with acquire', (store, t) =>
      addUp(t, store, { way: 'acquire', names: ['a'], rounds: 30, perRound: 1 }))

    test('an unprotected counter adds up with acquireLock', (store, t) =>
      addUp(t, store, { way: 'acquireLock', names: ['a'], rounds: 20, perRound: 1 }))

    test('unprotected counters add up with overlapping sets of names', (store, t) =>
      addUp(t, store, { way: 'several', names: ['a', 'b', 'c', 'd', 'e'], rounds: 20, perRound: 2 }))

    test('a process killed in the middle of everything leaves a usable store', async (store, t) => {
      store.mayLeaveLocks = true
      const ttlMs = 1000
      for (let round = 0; round < 3; round++) {
        const child = start(t, 'load', taskFor(store, { name: 's', ttlMs }))
        await child.next('going')
        await sleep(Math.random() * 40)
        child.kill('SIGKILL')
        assert.equal((await child.ended).signal, 'SIGKILL')
        const locks = await store.connect()
        const names = Array.from({ length: 10 }, (_, index) => `s:${index}`)
        const taken = await Promise.all(names.map((name) => locks.acquire([name, `${name}:more`], { waitMs: 20_000 })))
        for (const lock of taken) assert.equal(await lock.release(), true)
        await locks.close()
      }
    })

    if (!KINDS[kind].ordered) return
    test('waiters of two processes are served in the order of arrival', async (store, t) => {
      const locks = await store.connect()
      const held = await locks.acquire('n')
      const children = [start(t, 'waiter', taskFor(store)), start(t, 'waiter', taskFor(store))]
      for (const child of children) await child.next('ready')
      const asked = Array.from({ length: 12 }, (_, index) => index)
      for (const index of asked) {
        // In pairs, so that neighbours in the line are of one process as well as of two.
        const child = children[(index >> 1) % 2]
        child.send(JSON.stringify({ name: 'n', as: index }))
        await child.next('waiting')
      }
      await held.release()
      const served = []
      for (const child of children) {
        for (let count = 0; count < 6; count++) served.push(await child.next('served'))
      }
      served.sort((one, other) => (BigInt(one.fence) < BigInt(other.fence) ? -1 : 1))
      assert.deepEqual(served.map(({ as }) => as), asked)
      for (const child of children) await child.endInput()
    })
  })
}

suite('sqlite', 'a file that does not exist yet', (test) => {
  test('eight processes connect to it at the same time', async (store, t) => {
    const task = taskFor(store, { name: 'n', at: Date.now() + 2000 })
    const children = Array.from({ length: 8 }, () => start(t, 'connect', task))
    const fences = await Promise.all(children.map((child) => child.next('served')))
    await Promise.all(children.map(endsQuietly))
    assertGrowing(fences.map(BigInt).sort((one, other) => (one < other ? -1 : 1)))
  })
})

for (const kind of Object.keys(KINDS)) {
  suite(kind, 'the end of a process', (test) => {
    const leave = (t, store, way, more) => start(t, 'exit', taskFor(store, { name: 'n', way, ...more }), { requests: false })

    for (const way of ['renewing', 'gist', 'waited', 'closed', 'unawaited', 'hooks']) {
      test(`it ends by itself: ${way}`, async (store, t) => {
        store.mayLeaveLocks = way !== 'closed' && way !== 'unawaited'
        const child = leave(t, store, way)
        await endsQuietly(child)
        const expected = {
          gist: [{ acquired: true }],
          waited: [{ codes: ['LOCK_TIMEOUT', 'LOCK_TIMEOUT', 'LOCK_TIMEOUT'] }],
          hooks: [{ isHeld: true }],
        }
        assert.deepEqual(child.messages, expected[way] ?? [])
      })
    }

    for (const afterMs of [0, 30, 200]) {
      test(`process.exit() with calls in flight, after ${afterMs} ms`, async (store, t) => {
        store.mayLeaveLocks = true
        const child = leave(t, store, 'exit', { afterMs })
        await ends(child, { code: 7 })
        assert.equal(child.stderr, '')
      })
    }

    test('an uncaught error with calls in flight', async (store, t) => {
      store.mayLeaveLocks = true
      const child = leave(t, store, 'throws')
      await ends(child, { code: 1 })
      assert.match(child.stderr, /on purpose/)
    })

    test('SIGTERM without a handler', async (store, t) => {
      store.mayLeaveLocks = true
      const child = leave(t, store, 'terminated')
      await child.next('ready')
      child.kill('SIGTERM')
      await ends(child, { code: null, signal: 'SIGTERM' })
      assert.equal(child.stderr, '')
    })

    test('SIGTERM with a handler that closes the service', async (store, t) => {
      const child = leave(t, store, 'graceful')
      await child.next('ready')
      child.kill('SIGTERM')
      await endsQuietly(child)
    })
  })

  suite(kind, 'worker threads', (test) => {
    for (const way of ['midLease', 'midWait', 'midCalls', 'reload', 'together']) {
      test(way, async (store, t) => {
        store.mayLeaveLocks = true
        const rounds = 25
        const child = start(t, 'threads', taskFor(store, { name: 'n', way, rounds }), { requests: false })
        await until('it is done', () => child.end ?? child.messages.some(({ done }) => done), 60_000)
        await ends(child)
        assert.equal(child.stderr, '')
        assert.ok(child.messages.some(({ done }) => done))
        if (way === 'together') assert.equal(child.messages[0].count, 4 * rounds)
      })
    }
  })
}
