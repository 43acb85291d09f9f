// The guarantees between processes: blocked, suspended, killed and exiting processes, and their effect on the others.
import assert from 'node:assert/strict'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { start } from './children/start.mjs'
import { KINDS, suite } from './stores.mjs'
import { assertGrowing, inspectHeld, later, sleep, stopwatch, until, waiting } from './tools.mjs'

/** Returns the task of a child process that uses the store of a test. */
const taskFor = (store, more) => ({ url: store.target, options: store.options, ...more })

/**
 * Asserts that a process ends by itself, long before its leases expire.
 *
 * @param {ReturnType<typeof start>} child
 * @param {{ code?: number | null, signal?: NodeJS.Signals | null }} [end]
 */
async function assertEnds(child, { code = 0, signal = null } = {}) {
  const end = await Promise.race([child.ended, sleep(20_000, undefined, { ref: false })])
  assert.ok(end, `still running after 20 s; its messages: ${JSON.stringify(child.messages)} ${child.stderr}`)
  assert.deepEqual(end, { code, signal }, child.stderr)
  assert.deepEqual(
    child.messages.filter((message) => message.error ?? message.unhandled),
    [],
  )
}

async function assertEndsQuietly(child) {
  await assertEnds(child)
  assert.equal(child.stderr, '')
}

/** Asserts that four processes that add to counters under a lock lose no addition. */
async function assertAddsUp(t, store, { scenario, names, rounds, perRound }) {
  const folder = await mkdtemp(join(tmpdir(), 'holdfast-count-'))
  t.after(() => rm(folder, { recursive: true, force: true }))
  for (const name of names) await writeFile(join(folder, name), JSON.stringify({ count: 0, fence: '0' }))
  const task = taskFor(store, { scenario, names, rounds, folder })
  const children = Array.from({ length: 4 }, () => start(t, 'counter', task))
  for (const child of children) {
    assert.deepEqual(await child.next('lost', 80_000), [])
    await assertEnds(child)
  }
  let sum = 0
  for (const name of names) sum += JSON.parse(await readFile(join(folder, name), 'utf8')).count
  assert.equal(sum, 4 * rounds * perRound)
}

const STORES = 'sqlite redis redis-quorum mongodb mongodb-replica-set postgres mysql etcd zookeeper'
for (const kind of STORES.split(' ')) {
  suite(kind, 'leases between processes', (test) => {
    test('a process with a blocked event loop keeps its lock', async (store, t) => {
      const ttlMs = 4500
      const locks = await store.connect()
      const holder = start(t, 'hold', taskFor(store, { names: 'n', acquire: { ttlMs } }))
      const fence = BigInt(await holder.next('held'))
      const waiter = later(locks.acquire('n', { waitMs: 60_000 }))
      let [tries, wins, isStopped] = [0, 0, false]
      const trying = (async () => {
        for (; !isStopped; tries++, await sleep(20)) if (await locks.tryAcquire('n')) wins++
      })()

      holder.send(`block ${2 * ttlMs}`)
      const found = await holder.next('blocked')
      isStopped = true
      await trying
      assert.deepEqual(found, { isHeld: true, aborted: false, lost: 0 })
      assert.equal(wins, 0)
      assert.ok(tries > 20, `only ${tries} tries`)

      // The name is free after the release: only this lock blocked it.
      holder.send('release')
      assert.equal(await holder.next('released'), true)
      const lock = await waiter
      assert.ok(lock.fencingToken > fence)
      await lock.release()
    })

    test('a waiter is granted the lock of a killed process within its ttl and two seconds', async (store, t) => {
      store.useShortSessions()
      const ttlMs = 3500
      const locks = await store.connect()
      const holder = start(t, 'hold', taskFor(store, { names: ['n', 'm'], acquire: { ttlMs } }))
      const fence = BigInt(await holder.next('held'))
      // Long enough for a renewal.
      await sleep(ttlMs / 2)
      const waiters = ['n', 'm'].map((name) => later(locks.acquire(name, { waitMs: 60_000 })))
      await waiting(locks, 2)
      const before = performance.now()
      const { remainingMs } = await inspectHeld(locks, 'n')
      holder.kill('SIGKILL')
      const elapsedMs = stopwatch()
      const taken = await Promise.all(waiters)
      assert.ok(elapsedMs() < Math.max(ttlMs, store.deadMs ?? 0) + 2000, `it took ${elapsedMs()} ms`)
      const tookMs = performance.now() - before
      // Where a lease ends with a session, whole seconds are counted.
      assert.ok(
        tookMs > remainingMs - (store.deadMs ? 1000 : 100) - (store.clockErrorMs ?? 0),
        `${tookMs} ms, of which the lease was ${remainingMs} ms`,
      )
      for (const lock of taken) {
        assert.ok(lock.fencingToken > fence)
        await lock.release()
      }
    })

    test('a killed waiter blocks other waiters for no longer than its ttl and two seconds', async (store, t) => {
      store.useShortSessions()
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
      const elapsedMs = stopwatch()
      await held.release()
      const lock = await second
      assert.ok(elapsedMs() < Math.max(ttlMs, store.deadMs ?? 0) + 2000, `it took ${elapsedMs()} ms`)
      await lock.release()
    })

    test('a process that was suspended past its ttl sees the loss at its first check', async (store, t) => {
      const ttlMs = 4500
      const locks = await store.connect()
      const variants = [
        { loop: 'interval', check: 'isHeld' },
        { loop: 'immediate', check: 'aborted' },
        { loop: 'microtasks', check: 'throwIfAborted' },
        { loop: 'busy', check: 'reason' },
      ]
      const children = variants.map((variant) => {
        const name = `${variant.loop}-${variant.check}`
        return { name, fence: 0n, process: start(t, 'suspended', taskFor(store, { ...variant, name, ttlMs })) }
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
        const expected = { isHeld: false, aborted: true, code: 'LOCK_LOST', abortEvents: 1, remainingMs: 0 }
        assert.deepEqual(await child.process.next('found'), expected, child.name)
        await assertEndsQuietly(child.process)
        // The clean-up of the suspended process did not affect the next holder.
        assert.equal((await locks.inspect(child.name)).fencingToken, taken[index].fencingToken)
        assert.equal(await taken[index].release(), true)
      }
    })
  })

  suite(kind, 'contention between processes', (test) => {
    test('processes that increment a counter under acquire lose no increment', (store, t) =>
      assertAddsUp(t, store, { scenario: 'acquire', names: ['a'], rounds: 30, perRound: 1 }))

    test('processes that increment a counter under acquireLock lose no increment', (store, t) =>
      assertAddsUp(t, store, { scenario: 'acquireLock', names: ['a'], rounds: 20, perRound: 1 }))

    test('processes that increment counters under overlapping sets of names lose no increment', (store, t) =>
      assertAddsUp(t, store, { scenario: 'several', names: ['a', 'b', 'c', 'd', 'e'], rounds: 20, perRound: 2 }))

    test('a process killed under load leaves a usable store', async (store, t) => {
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
      const expected = Array.from({ length: 12 }, (_, index) => index)
      for (const index of expected) {
        // In pairs, so that neighbours in the queue belong to one process or to two.
        const child = children[(index >> 1) % 2]
        child.send(JSON.stringify({ name: 'n', label: index }))
        await child.next('waiting')
      }
      await held.release()
      const served = []
      for (const child of children) {
        for (let count = 0; count < 6; count++) served.push(await child.next('served'))
      }
      served.sort((one, other) => (BigInt(one.fence) < BigInt(other.fence) ? -1 : 1))
      assert.deepEqual(
        served.map(({ label }) => label),
        expected,
      )
      for (const child of children) await child.endInput()
    })
  })
}

suite('sqlite', 'a missing file', (test) => {
  test('eight processes connect to a missing file at the same time', async (store, t) => {
    const task = taskFor(store, { name: 'n', at: Date.now() + 2000 })
    const children = Array.from({ length: 8 }, () => start(t, 'connect', task))
    const fences = await Promise.all(children.map((child) => child.next('served')))
    await Promise.all(children.map(assertEndsQuietly))
    assertGrowing(fences.map(BigInt).sort((one, other) => (one < other ? -1 : 1)))
  })
})

/** Kinds whose threads and connections are those of another kind here. */
const ALIKE = ['redis-sentinel', 'mongodb', 'postgres-pooler', 'postgres-pooler-declared']
for (const kind of Object.keys(KINDS).filter((kind) => !ALIKE.includes(kind))) {
  suite(kind, 'the end of a process', (test) => {
    const startExit = (t, store, scenario, more) =>
      start(t, 'exit', taskFor(store, { name: 'n', scenario, ...more }), { requests: false })

    for (const scenario of ['renewing', 'gist', 'waited', 'closed', 'unawaited', 'hooks']) {
      test(`a process ends by itself: ${scenario}`, async (store, t) => {
        store.mayLeaveLocks = scenario !== 'closed' && scenario !== 'unawaited'
        const child = startExit(t, store, scenario)
        await assertEndsQuietly(child)
        const expected = {
          gist: [{ acquired: true }],
          waited: [{ codes: ['LOCK_TIMEOUT', 'LOCK_TIMEOUT', 'LOCK_TIMEOUT'] }],
          hooks: [{ isHeld: true }],
        }
        assert.deepEqual(child.messages, expected[scenario] ?? [])
      })
    }

    for (const afterMs of [0, 30, 200]) {
      test(`process.exit() after ${afterMs} ms ends a process with calls in flight`, async (store, t) => {
        store.mayLeaveLocks = true
        const child = startExit(t, store, 'exit', { afterMs })
        await assertEnds(child, { code: 7 })
        assert.equal(child.stderr, '')
      })
    }

    test('an uncaught error ends a process with calls in flight', async (store, t) => {
      store.mayLeaveLocks = true
      const child = startExit(t, store, 'throws')
      await assertEnds(child, { code: 1 })
      assert.match(child.stderr, /on purpose/)
    })

    test('SIGTERM without a handler ends the process', async (store, t) => {
      store.mayLeaveLocks = true
      const child = startExit(t, store, 'terminated')
      await child.next('ready')
      child.kill('SIGTERM')
      await assertEnds(child, { code: null, signal: 'SIGTERM' })
      assert.equal(child.stderr, '')
    })

    test('SIGTERM with a handler that closes the service ends the process', async (store, t) => {
      const child = startExit(t, store, 'graceful')
      await child.next('ready')
      child.kill('SIGTERM')
      await assertEndsQuietly(child)
    })
  })

  suite(kind, 'worker threads', (test) => {
    for (const scenario of ['midLease', 'midWait', 'midCalls', 'reload', 'together']) {
      test(scenario, async (store, t) => {
        store.mayLeaveLocks = true
        store.useShortSessions()
        const rounds = 25
        const child = start(t, 'threads', taskFor(store, { name: 'n', scenario, rounds }), { requests: false })
        await until('the child is done', () => child.end ?? child.messages.some(({ done }) => done), 60_000)
        await assertEnds(child)
        assert.equal(child.stderr, '')
        assert.ok(child.messages.some(({ done }) => done))
        if (scenario === 'together') assert.equal(child.messages[0].count, 4 * rounds)
      })
    }
  })
}
