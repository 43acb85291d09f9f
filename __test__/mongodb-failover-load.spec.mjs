// A MongoDB replica set under load whose primaries step down, are killed or hang, and whose members take writes back.
import assert from 'node:assert/strict'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { start } from './children/start.mjs'
import { Load, PATIENCE_MS, TEST_COMMANDS, replicaSetSuite, successor, takesBack, withoutReplication } from './replica-set.mjs'
import { assertGrowing, rejects, sleep, until } from './tools.mjs'

const NAMES = ['a', 'b', 'c']
const STORM_MS = process.env.CI ? 60_000 : 15_000
const EVERY_MS = 2000

/** Runs `trouble` while several services take and release the same names all the time. */
async function underLoad({ connectAll }, trouble) {
  const services = await connectAll(4, { storeTimeoutMs: Load.STORE_TIMEOUT_MS })
  const load = new Load(services, { names: NAMES, workers: 4 })
  try {
    await load.goesOn(20)
    await trouble(load)
    await load.goesOn(20)
  } finally {
    await load.end()
  }
  // The same services go on, and nobody stands in the way for ever.
  for (const service of services) {
    for (const name of NAMES) {
      const lock = await service.acquire(name, { waitMs: PATIENCE_MS })
      assert.equal(await lock.release(), true)
    }
  }
  return load
}

replicaSetSuite('fail-over under load', { args: TEST_COMMANDS }, (test) => {
  test(`a step-down every ${EVERY_MS / 1000} s`, async ({ set, ...fixture }, t) => {
    let [steps, stretches] = [0, 0]
    const load = await underLoad(fixture, async (load) => {
      for (const end = performance.now() + STORM_MS; performance.now() < end; steps++) {
        const { granted } = load
        const next = sleep(EVERY_MS)
        // By turns in good order, and as if nobody had known.
        await set.stepDown({ force: steps % 2 === 1 })
        await next
        stretches += load.granted > granted
      }
    })
    t.diagnostic(`${steps} step-downs, ${load.summary}`)
    assert.ok(stretches > steps / 2, `work went on after ${stretches} of ${steps} step-downs`)
  })

  test('the SIGKILL of the primary, and its return', async ({ set, options, ...fixture }, t) => {
    // Beside the load that looks at every lease: processes that only have what the lock promises.
    const folder = await mkdtemp(join(tmpdir(), 'holdfast-failover-'))
    t.after(() => rm(folder, { recursive: true, force: true }))
    await writeFile(join(folder, 'count'), JSON.stringify({ count: 0, fence: '0' }))
    const patient = { ...options, storeTimeoutMs: PATIENCE_MS }
    const task = { url: set.url, options: patient, way: 'acquire', names: ['count'], rounds: 40, folder }
    const children = Array.from({ length: 4 }, () => start(t, 'counter', task))
    const load = await underLoad(fixture, async (load) => {
      for (let round = 0; round < 2; round++) {
        const old = await until('a primary', set.primary)
        await old.kill()
        await load.goesOn(20)
        await old.restart()
        await set.whole()
        await load.goesOn(20)
      }
    })
    for (const child of children) assert.equal(await child.next('lost', 120_000), 0)
    assert.equal(JSON.parse(await readFile(join(folder, 'count'), 'utf8')).count, 4 * 40)
    t.diagnostic(load.summary)
  })

  test('a primary that hangs, and comes back with answers and writes of its own', async ({ set, ...fixture }, t) => {
    const load = await underLoad(fixture, async (load) => {
      for (let round = 0; round < 2; round++) {
        // What it writes from now on nobody else will have, so that it has to be taken back.
        const { primary: old, end } = await withoutReplication(set)
        await takesBack(old, async () => {
          await sleep(500)
          await old.pause()
          await successor(set, old)
          await end()
          await load.goesOn(20)
          old.resume()
          await load.goesOn(20)
        })
        await set.whole()
      }
    })
    t.diagnostic(load.summary)
  })
})

replicaSetSuite('writes that are taken back', { args: TEST_COMMANDS }, (test) => {
  /** Cuts the primary off, does `meanwhile` at it, and `afterwards` at its successor; then the old one comes back. */
  async function partition(set, meanwhile, afterwards) {
    const { primary: old, end } = await withoutReplication(set)
    await takesBack(old, async () => {
      await meanwhile()
      await old.pause()
      await successor(set, old)
      await end()
      await afterwards()
      old.resume()
    })
    await set.whole()
  }

  test('what a majority never had was never granted', async ({ set, connect }) => {
    const [locks, other] = [await connect({ storeTimeoutMs: 1500 }), await connect({ storeTimeoutMs: PATIENCE_MS })]
    const first = await locks.acquire('n')
    assert.equal(await first.release(), true)
    let second
    await partition(
      set,
      async () => {
        const calls = [
          locks.acquire('n', { ttlMs: 60_000 }),
          locks.tryAcquire(['o', 'p'], { ttlMs: 60_000 }),
          locks.acquireLock('q', 60),
          locks.acquireAndExecute('r', 60, () => assert.fail('it was not granted')),
        ]
        await Promise.all(calls.map((call) => rejects(call, 'LOCK_STORE', { retryable: true, engine: 'mongodb' })))
      },
      async () => {
        second = await other.acquire('n', { ttlMs: 60_000, waitMs: PATIENCE_MS })
        assert.ok(second.fencingToken > first.fencingToken)
      },
    )
    // What was under way at the old primary has not touched it.
    assert.equal(second.isHeld, true)
    assert.equal((await other.inspect('n')).fencingToken, second.fencingToken)
    assert.equal(await other.tryAcquire('n'), null)
    const tokens = [first.fencingToken, second.fencingToken]
    assert.equal(await second.release(), true)
    for (const service of [locks, other]) {
      const next = await service.acquire('n', { waitMs: PATIENCE_MS })
      tokens.push(next.fencingToken)
      assert.equal(await next.release(), true)
    }
    assertGrowing(tokens)
  })

  test('what w=1 granted is lost, and the tokens of the others grow', async ({ set, connect }) => {
    const weak = await connect({ storeTimeoutMs: PATIENCE_MS }, `${set.url}&w=1`)
    const strong = await connect({ storeTimeoutMs: PATIENCE_MS })
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
        // The price of w=1: a second holder.
        second = await strong.acquire('n', { ttlMs: 60_000, waitMs: PATIENCE_MS })
        assert.equal(forgotten.isHeld, true)
      },
    )
    assert.equal((await weak.inspect('n')).fencingToken, second.fencingToken)
    await rejects(forgotten.extend(70_000), 'LOCK_LOST')
    assert.equal(forgotten.signal.aborted, true)
    assert.equal(await forgotten.release(), false)
    assert.equal(await weak.tryAcquire('n'), null)
    assert.equal((await strong.inspect('n')).fencingToken, second.fencingToken)
    assert.equal(await second.release(), true)
    const third = await strong.acquire('n')
    assert.equal(await third.release(), true)
    assertGrowing([first, second, third].map((lock) => lock.fencingToken))
  })
})
