// `holdfast/testing`: an isolated store for each test, locks that are lost, and a clock that moves.
import assert from 'node:assert/strict'
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { describe, it } from 'node:test'
import { createTestLocks } from 'holdfast/testing'
import { LockService } from '../index.js'
import { blocksOf, root } from './readme/blocks.mjs'
import { node } from './readme/run.mjs'
import { assertGrowing, assertLockError, rejects, until, waiting } from './tools.mjs'

/** Runs a test with an isolated store, which is closed at the end. */
const test = (title, body) =>
  it(title, { timeout: 60_000 }, async (t) => {
    const testLocks = await createTestLocks()
    t.after(testLocks.close)
    await body(testLocks)
  })

/** Records the events of a service. */
function recorder() {
  const events = []
  return { events, types: () => events.map(({ type }) => type), onEvent: (event) => events.push(event) }
}

describe('an isolated store', { concurrency: 4 }, () => {
  test('each call creates another store', async ({ locks }) => {
    const other = await createTestLocks()
    assert.equal(await locks.acquireLock('a'), true)
    assert.equal(await other.locks.acquireLock('a'), true)
    await other[Symbol.asyncDispose]()
    await rejects(other.locks.acquireLock('b'), 'LOCK_CLOSED')
    assert.equal((await locks.list()).length, 1)
  })

  test('connect() is another process on the same store', async ({ locks, connect }) => {
    const stranger = await connect({ defaults: { ttlMs: '5m' } })
    const lock = await locks.acquire('a')
    assert.equal(await stranger.tryAcquire('a'), null)
    const waiter = stranger.acquire('a')
    await waiting(stranger, 1)
    assert.equal(await lock.release(), true)
    const next = await waiter
    assert.ok(next.remainingMs > 200_000 && next.fencingToken > lock.fencingToken)
  })

  test('close() closes every service, and may be called again', async ({ locks, connect, close }) => {
    const stranger = await connect()
    await close()
    await close()
    for (const closed of [locks, stranger]) await rejects(closed.acquire('a'), 'LOCK_CLOSED')
  })

  test('invalid arguments are rejected', async ({ connect, lose, advance }) => {
    for (const duration of [0, -1, NaN, Infinity, '5 minutes', undefined, null, {}]) {
      await rejects(advance(/** @type {any} */ (duration)), 'LOCK_INVALID_ARGUMENT')
    }
    for (const name of [undefined, 5, '']) await rejects(lose(/** @type {any} */ (name)), 'LOCK_INVALID_ARGUMENT')
    const options = /** @type {any} */ ({ keyPrefix: 'p' })
    for (const call of [connect, createTestLocks]) await rejects(call(options), 'LOCK_INVALID_ARGUMENT')
  })

  it('is loaded by import and by require, and `holdfast` does not export it', async () => {
    const required = createRequire(import.meta.url)('holdfast/testing')
    assert.deepEqual(Object.keys(required), ['createTestLocks'])
    assert.equal(required.createTestLocks, createTestLocks)
    assert.equal('createTestLocks' in (await import('holdfast')), false)
  })
})

describe('lose()', { concurrency: 4 }, () => {
  for (const renew of [true, false]) {
    test(`the holder loses the lock, renew: ${renew}`, async ({ locks, lose }) => {
      const lock = await locks.acquire('a', { renew })
      const reasons = []
      lock.signal.addEventListener('abort', () => reasons.push(lock.signal.reason))
      await lose('a')
      assert.equal(reasons.length, 1, 'the listener has run')
      assertLockError(reasons[0], 'LOCK_LOST', { key: 'a' })
      assert.match(reasons[0].message, /the store no longer has it/)
      assert.deepEqual([lock.isHeld, lock.remainingMs], [false, 0])
      await rejects(lock.extend(1000), 'LOCK_LOST')
      assert.equal(await locks.inspect('a'), null)
      assert.equal(await lock.release(), false)
    })
  }

  test('using() rejects after its job, with the error of the job as cause', async ({ locks, lose }) => {
    const job = locks.using('a', async () => lose('a'))
    await rejects(job, 'LOCK_LOST')
    const failed = locks.using('b', async ({ signal }) => {
      await lose('b')
      signal.throwIfAborted()
    })
    const error = await rejects(failed, 'LOCK_LOST')
    assertLockError(error.cause, 'LOCK_LOST')
  })

  test('the next waiter gets the name', async ({ locks, connect, lose }) => {
    const stranger = await connect()
    const lock = await locks.acquire('a')
    let next
    const waiter = stranger.acquire('a', { waitMs: Infinity }).then((granted) => (next = granted))
    await waiting(stranger, 1)
    await lose('a')
    assert.ok(next?.isHeld, 'lose() resolves after the grant')
    assert.ok((await waiter).fencingToken > lock.fencingToken)
    assert.equal(lock.isHeld, false)
  })

  test('a lock of several names is lost with all of them', async ({ locks, lose }) => {
    const lock = await locks.acquire(['a', 'b', 'c'])
    await lose('b')
    assert.equal(lock.isHeld, false)
    assert.deepEqual(await locks.list(), [])
  })

  test('a lock of acquireLock is lost', async ({ locks, lose }) => {
    assert.equal(await locks.acquireLock('a'), true)
    await lose('a')
    assert.equal(await locks.releaseLock('a'), false)
  })

  test('a loss is an event, and counted', async ({ connect, lose }) => {
    const { types, onEvent } = recorder()
    const locks = await connect({ onEvent })
    await locks.acquire('a')
    await lose('a')
    assert.deepEqual(types(), ['acquired', 'lost'])
    assert.deepEqual([locks.stats().held, locks.stats().lost], [0, 1])
  })

  test('a free name is an error', async ({ locks, lose }) => {
    const { message } = await rejects(lose('a'), 'LOCK_INVALID_ARGUMENT')
    assert.match(message, /must be held, got the free name "a"/)
    await (await locks.acquire('a')).release()
    await rejects(lose('a'), 'LOCK_INVALID_ARGUMENT')
  })
})

describe('semaphores and read/write locks', { concurrency: 4 }, () => {
  test('lose() with shared: all holders lose them, and the next waiters are granted', async ({
    locks,
    connect,
    lose,
  }) => {
    const stranger = await connect()
    const semaphore = locks.semaphore('a', 2)
    const held = [await semaphore.acquire(), await semaphore.acquire()]
    const lock = await locks.acquire('a')
    const waiter = stranger.semaphore('a', 2).acquire({ permits: 2, waitMs: Infinity })
    await waiting(stranger, 1)
    await lose('a', { shared: true })
    for (const { signal } of held) assertLockError(signal.reason, 'LOCK_LOST', { key: 'a' })
    assert.equal((await waiter).isHeld, true)
    await lose('a', {})
    assert.equal(lock.isHeld, false)
    await lose('a', { shared: true })
    await rejects(lose('a', { shared: true }), 'LOCK_INVALID_ARGUMENT')
    for (const options of [5, { shared: 1 }, { all: true }]) {
      await rejects(lose('a', /** @type {any} */ (options)), 'LOCK_INVALID_ARGUMENT')
    }
  })

  test('advance() ends permits without renewal, and renews the others', async ({ connect, advance }) => {
    const { events, onEvent } = recorder()
    const locks = await connect({ onEvent })
    const semaphore = locks.semaphore('a', 3)
    const brief = await semaphore.acquire({ permits: 2, ttlMs: '1m', renew: false })
    const renewed = await semaphore.acquire({ ttlMs: '1m' })
    const writer = locks.readWriteLock('b').write
    const writing = await writer.acquire({ maxHoldMs: '5m' })
    const next = writer.acquire({ waitMs: Infinity })
    await waiting(locks, 1)
    await advance('59s')
    assert.equal(brief.isHeld, true)
    assert.equal(await semaphore.tryAcquire(), null)
    await advance('10m')
    assert.deepEqual([brief.isHeld, renewed.isHeld, writing.isHeld, (await next).isHeld], [false, true, false, true])
    assert.equal((await semaphore.inspect()).used, 1)
    assert.equal(await (await semaphore.acquire({ permits: 2, waitMs: 0 })).release(), true)
    const shares = events.filter(({ type }) => type === 'lost').map(({ name, share }) => [name, share])
    assert.deepEqual(shares, [
      ['a', { permits: 2, limit: 3 }],
      ['b', { permits: 1_048_576, limit: 1_048_576 }],
    ])
  })
})

describe('advance()', { concurrency: 4 }, () => {
  test('a lease that is not renewed expires', async ({ locks, connect, advance }) => {
    const stranger = await connect()
    const lock = await locks.acquire('a', { ttlMs: 30_000, renew: false })
    let isAborted = false
    lock.signal.addEventListener('abort', () => (isAborted = true))
    await advance('20s')
    assert.equal(lock.isHeld, true)
    assert.ok(lock.remainingMs < 10_000 && lock.remainingMs > 5000, String(lock.remainingMs))
    const info = await stranger.inspect('a')
    assert.ok(info.remainingMs <= 10_000 && info.remainingMs > 5000, String(info.remainingMs))
    assert.equal(await stranger.tryAcquire('a'), null)
    await advance(10_000)
    assert.deepEqual([isAborted, lock.isHeld], [true, false])
    assertLockError(lock.signal.reason, 'LOCK_LOST', { key: 'a' })
    assert.match(lock.signal.reason.message, /its ttl has passed/)
    assert.equal(await stranger.acquireLock('a'), true)
  })

  test('a lease that is renewed stays held', async ({ connect, advance }) => {
    const { events, onEvent } = recorder()
    const locks = await connect({ onEvent })
    const lock = await locks.acquire('a', { ttlMs: 30_000 })
    await advance('1h')
    assert.ok(lock.isHeld && lock.remainingMs > 15_000, String(lock.remainingMs))
    const { renewed, lost } = locks.stats()
    // Every 9 to 10 s.
    assert.ok(renewed >= 359 && renewed <= 401, `${renewed} renewals`)
    assert.equal(lost, 0)
    assert.equal(await lock.release(), true)
    await until('released', () => events.at(-1).type === 'released')
    assert.ok(events.at(-1).heldMs >= 3_600_000, `held for ${events.at(-1).heldMs} ms`)
  })

  test('leases of several services are renewed at their times', async ({ locks, connect, advance }) => {
    const others = [await connect(), await connect()]
    const held = await Promise.all([
      locks.acquire('a', { ttlMs: 10_000 }),
      others[0].acquire(['b', 'c'], { ttlMs: 45_000 }),
      others[1].acquire('d', { ttlMs: 300_000 }),
      others[1].acquire('e', { ttlMs: 20_000, renew: false }),
    ])
    await advance('15m')
    assert.deepEqual(
      held.map(({ isHeld }) => isHeld),
      [true, true, true, false],
    )
    assert.deepEqual(
      (await locks.list()).map(({ name }) => name),
      ['a', 'b', 'c', 'd'],
    )
  })

  test('waiters get what expired, in their order', async ({ locks, connect, advance }) => {
    const stranger = await connect()
    const order = []
    const options = { ttlMs: 30_000, renew: false, waitMs: Infinity }
    await locks.acquire('a', options)
    const waiters = ['first', 'second', 'third'].map(async (title, index) => {
      await until('the one before waits', () => stranger.stats().waiting === index)
      const lock = await stranger.acquire('a', options)
      order.push(title)
      return lock
    })
    await waiting(stranger, 3)
    await advance('20s')
    assert.deepEqual(order, [])
    await advance('10s')
    assert.deepEqual(order, ['first'])
    // The ends of two more leases of 30 s.
    await advance('70s')
    assert.deepEqual(order, ['first', 'second', 'third'])
    const all = await Promise.all(waiters)
    assertGrowing(all.map(({ fencingToken }) => fencingToken))
    assert.deepEqual(
      all.map(({ isHeld }) => isHeld),
      [false, false, true],
    )
  })

  test('maxHoldMs passes, also with renewal', async ({ locks, connect, advance }) => {
    const stranger = await connect()
    const lock = await locks.acquire('a', { ttlMs: 30_000, maxHoldMs: '2m' })
    await advance('110s')
    assert.equal(lock.isHeld, true)
    const waiter = stranger.acquire('a')
    await waiting(stranger, 1)
    await advance('10s')
    assert.equal(lock.isHeld, false)
    assert.match(lock.signal.reason.message, /maxHoldMs has passed/)
    assert.equal((await waiter).isHeld, true)
  })

  test('minHoldMs passes', async ({ locks, advance }) => {
    const lock = await locks.acquire('a', { minHoldMs: '1m' })
    await advance('20s')
    assert.equal(await lock.release(), true)
    await advance('30s')
    assert.equal(await locks.tryAcquire('a'), null)
    await advance('10s')
    assert.ok(await locks.tryAcquire('a'))
  })

  test('extend() counts from the moved clock', async ({ locks, advance }) => {
    const lock = await locks.acquire('a', { ttlMs: 30_000, renew: false })
    await advance('20s')
    await lock.extend('30s')
    await advance('20s')
    assert.equal(lock.isHeld, true)
    await advance('10s')
    assert.equal(lock.isHeld, false)
  })

  test('the store has the moved time', async ({ locks, advance }) => {
    const before = await locks.acquire('a')
    await advance('1h')
    const after = await locks.acquire('b')
    assert.ok(after.fencingToken > before.fencingToken)
    const [one, two] = await locks.list()
    assert.ok(two.holder.since.getTime() - one.holder.since.getTime() >= 3_600_000)
  })

  test('the wait of a call is in real time', async ({ locks, connect, advance }) => {
    const stranger = await connect()
    const lock = await locks.acquire('a')
    const waiter = stranger.acquire('a', { waitMs: 60_000 })
    await waiting(stranger, 1)
    await advance('1h')
    assert.equal(stranger.stats().waiting, 1)
    await lock.release()
    assert.equal((await waiter).isHeld, true)
  })

  test('the clocks of other stores do not move', async ({ advance }) => {
    const other = await createTestLocks()
    const memory = await LockService.connect('memory:')
    const held = await Promise.all(
      [other.locks, memory].map((locks) => locks.acquire(`other-${process.pid}`, { renew: false })),
    )
    await advance('1h')
    assert.ok(held.every(({ remainingMs }) => remainingMs > 15_000))
    await Promise.all([other.close(), memory.close()])
  })

  test('without a lock, and after close(), it has no effect', async ({ advance, close }) => {
    await advance('1h')
    await close()
    await advance('1h')
  })
})

describe('docs/recipes/testing.md', () => {
  for (const { line, language, code } of blocksOf('docs/recipes/testing.md')) {
    it(`the block of line ${line} passes`, { timeout: 60_000 }, async () => {
      assert.equal(language, 'js')
      const folder = mkdtempSync(join(tmpdir(), 'holdfast-test-'))
      try {
        mkdirSync(join(folder, 'node_modules'))
        symlinkSync(root, join(folder, 'node_modules', 'holdfast'), 'junction')
        const file = join(folder, 'job.test.mjs')
        writeFileSync(file, code)
        // Without the variable of this test runner, which changes the format of the output.
        const { stdout } = await node([file], folder, { NODE_TEST_CONTEXT: undefined })
        assert.match(stdout, /^. pass [1-9]\d*$/m)
        assert.match(stdout, /^. fail 0$/m)
      } finally {
        rmSync(folder, { recursive: true, force: true })
      }
    })
  }
})
