// A MongoDB replica set under load: primaries step down, are killed or hang, and members roll back writes.
import assert from 'node:assert/strict'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { start } from './children/start.mjs'
import {
  Load,
  FAILOVER_TIMEOUT_MS,
  TEST_COMMANDS,
  replicaSetSuite,
  newPrimary,
  waitForRollback,
  withoutReplication,
} from './replica-set.mjs'
import { assertGrowing, prepared, rejects, sleep, until } from './tools.mjs'

const NAMES = ['a', 'b', 'c']
const STORM_MS = process.env.CI ? 30_000 : 15_000
const EVERY_MS = 2000
const KILLS = 2
/** The grants of each process that increments a counter, and their ttl (`children/counter.mjs`). */
const ROUNDS = 40
const TTL_MS = 20_000

/** Runs `fault` while several services acquire and release the same names. */
async function underLoad({ connectAll }, fault) {
  const services = await connectAll(4, { storeTimeoutMs: Load.STORE_TIMEOUT_MS })
  const load = new Load(services, { names: NAMES, workers: 4 })
  try {
    await load.waitForGrants(20)
    await fault(load)
    await load.waitForGrants(20)
  } finally {
    await load.end()
  }
  // The same services continue, and no name stays busy.
  for (const service of services) {
    for (const name of NAMES) {
      const lock = await service.acquire(name, { waitMs: FAILOVER_TIMEOUT_MS })
      assert.equal(await lock.release(), true)
    }
  }
  return load
}

replicaSetSuite('fail-over under load', { args: TEST_COMMANDS }, (test) => {
  test(`a step-down every ${EVERY_MS / 1000} s`, async ({ set, ...fixture }, t) => {
    let [steps, stepsWithGrants] = [0, 0]
    const load = await underLoad(fixture, async (load) => {
      for (const end = performance.now() + STORM_MS; performance.now() < end; steps++) {
        const { granted } = load
        const next = sleep(EVERY_MS)
        // Alternately with a proposed successor, and forced.
        await set.stepDown({ force: steps % 2 === 1 })
        await next
        if (load.granted > granted) stepsWithGrants++
      }
    })
    t.diagnostic(`${steps} step-downs, ${load.summary}`)
    assert.ok(stepsWithGrants > steps / 2, `grants after ${stepsWithGrants} of ${steps} step-downs`)
  })

  test('a SIGKILL of the primary and its restart', async ({ set, options, ...fixture }, t) => {
    // In addition to the load, which checks every lease: processes that increment a counter protected by the lock alone.
    const folder = await mkdtemp(join(tmpdir(), 'holdfast-failover-'))
    t.after(() => rm(folder, { recursive: true, force: true }))
    await writeFile(join(folder, 'count'), JSON.stringify({ count: 0, fence: '0' }))
    const limits = { ...options, storeTimeoutMs: FAILOVER_TIMEOUT_MS }
    const task = { url: set.url, options: limits, scenario: 'acquire', names: ['count'], rounds: ROUNDS, folder }
    const children = Array.from({ length: 4 }, () => start(t, 'counter', task))
    const load = await underLoad(fixture, async (load) => {
      for (let round = 0; round < KILLS; round++) {
        const old = await until('a primary', set.primary)
        await old.kill()
        await load.waitForGrants(20)
        await old.restart()
        await set.ready()
        await load.waitForGrants(20)
      }
    })
    // A lock that was handed off has a lease of 2 s until it is renewed, which fails without a primary. Another one lasts longer
    // than an election, and the store always has it.
    const lost = (await Promise.all(children.map((child) => child.next('lost', 120_000)))).flat()
    for (const { heldMs, reason } of lost) {
      assert.ok(heldMs < TTL_MS / 2, `lost after ${heldMs} ms: ${reason}`)
      assert.doesNotMatch(reason, /the store no longer has it/)
    }
    assert.ok(lost.length < ROUNDS, `${lost.length} of ${4 * ROUNDS} locks lost`)
    assert.equal(JSON.parse(await readFile(join(folder, 'count'), 'utf8')).count, 4 * ROUNDS)
    t.diagnostic(`${load.summary}, locks lost: ${JSON.stringify(lost)}`)
  })

  test('a primary that hangs, and continues with unreplicated writes', async ({ set, ...fixture }, t) => {
    const load = await underLoad(fixture, async (load) => {
      for (let round = 0; round < 2; round++) {
        // Its writes from now on are not replicated, and have to be rolled back.
        const { primary: old, end } = await withoutReplication(set)
        await waitForRollback(old, async () => {
          await sleep(500)
          await old.pause()
          await newPrimary(set, old)
          await end()
          await load.waitForGrants(20)
          old.resume()
          await load.waitForGrants(20)
        })
        await set.ready()
      }
    })
    t.diagnostic(load.summary)
  })
})

replicaSetSuite('writes that are rolled back', { args: TEST_COMMANDS }, (test) => {
  /** Isolates the primary, runs `meanwhile` on it and `afterwards` on the next primary; then the old primary resumes. */
  async function partition(set, meanwhile, afterwards) {
    const { primary: old, end } = await withoutReplication(set)
    await waitForRollback(old, async () => {
      await meanwhile()
      await old.pause()
      await newPrimary(set, old)
      await end()
      await afterwards()
      old.resume()
    })
    await set.ready()
  }

  test('a write that never reached a majority was never granted', async ({ set, connect }) => {
    const [locks, other] = [
      await connect({ storeTimeoutMs: 1500, connectMs: 20_000 }),
      await connect({ storeTimeoutMs: FAILOVER_TIMEOUT_MS }),
    ]
    const first = await other.acquire('n')
    assert.equal(await first.release(), true)
    await prepared(() => locks.using('n', () => {}))
    let second
    await partition(
      set,
      async () => {
        const calls = [
          locks.acquire('n', { ttlMs: 60_000 }),
          locks.tryAcquire(['o', 'p'], { ttlMs: 60_000 }),
          locks.acquireLock('q', 60),
          locks.acquireAndExecute('r', 60, () => assert.fail('fn was called')),
        ]
        await Promise.all(calls.map((call) => rejects(call, 'LOCK_STORE', { retryable: true, engine: 'mongodb' })))
      },
      async () => {
        second = await other.acquire('n', { ttlMs: 60_000, waitMs: FAILOVER_TIMEOUT_MS })
        assert.ok(second.fencingToken > first.fencingToken)
      },
    )
    // The writes at the old primary did not affect this lock.
    assert.equal(second.isHeld, true)
    assert.equal((await other.inspect('n'))?.fencingToken, second.fencingToken)
    assert.equal(await other.tryAcquire('n'), null)
    const tokens = [first.fencingToken, second.fencingToken]
    assert.equal(await second.release(), true)
    for (const service of [locks, other]) {
      const next = await service.acquire('n', { waitMs: FAILOVER_TIMEOUT_MS })
      tokens.push(next.fencingToken)
      assert.equal(await next.release(), true)
    }
    assertGrowing(tokens)
  })

  test('a lock granted with w=1 is lost, and the fencing tokens of other grants grow', async ({ set, connect }) => {
    const weak = await connect({ storeTimeoutMs: FAILOVER_TIMEOUT_MS }, `${set.url}&w=1`)
    const strong = await connect({ storeTimeoutMs: FAILOVER_TIMEOUT_MS })
    const first = await strong.acquire('n')
    assert.equal(await first.release(), true)
    let forgotten, second
    await partition(
      set,
      async () => {
        forgotten = await weak.acquire('n', { ttlMs: 60_000, renew: false })
        assert.ok(forgotten.fencingToken > first.fencingToken)
      },
      async () => {
        // The cost of w=1: a second holder.
        second = await strong.acquire('n', { ttlMs: 60_000, waitMs: FAILOVER_TIMEOUT_MS })
        assert.equal(forgotten.isHeld, true)
      },
    )
    assert.equal((await weak.inspect('n'))?.fencingToken, second.fencingToken)
    await rejects(forgotten.extend(70_000), 'LOCK_LOST')
    assert.equal(forgotten.signal.aborted, true)
    assert.equal(await forgotten.release(), false)
    assert.equal(await weak.tryAcquire('n'), null)
    assert.equal((await strong.inspect('n'))?.fencingToken, second.fencingToken)
    assert.equal(await second.release(), true)
    const third = await strong.acquire('n')
    assert.equal(await third.release(), true)
    assertGrowing([first, second, third].map((lock) => lock.fencingToken))
  })
})
