// Semaphores and read/write locks: bad input, and the stores that have none.
import assert from 'node:assert/strict'
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { describe, it } from 'node:test'
import { LockService } from '../index.js'
import { KINDS, suite } from './stores.mjs'
import { rejection, rejects, until, wrong } from './tools.mjs'

const symbol = 'a symbol, bigint or external'
/** Values that are no whole number from 1 to 1048576, and how a message shows them. */
const noNumber = [
  [null, 'null'],
  [0, '0'],
  [-0, '-0'],
  [-1, '-1'],
  [1.5, '1.5'],
  [NaN, 'NaN'],
  [Infinity, 'Infinity'],
  [1_048_577, '1048577'],
  [2 ** 32 + 1, '4294967297'],
  ['5', '"5"'],
  [true, 'true'],
  [5n, symbol],
  [[5], 'an array'],
  [() => 5, 'a function'],
]
const pass = ' (pass the number itself: semaphore(name, 5))'

/** Asserts that a call throws `LOCK_INVALID_ARGUMENT` with a message. */
function throws(call, message) {
  assert.throws(call, { name: 'LockError', code: 'LOCK_INVALID_ARGUMENT', message, retryable: false })
}

suite('memory', 'bad input of semaphores and read/write locks', (test) => {
  test('a bad limit or name is an error of the call that creates the object', async (store) => {
    const a = await store.connect()
    const rule = 'limit must be a whole number from 1 to 1048576, got'
    for (const [limit, shown] of [...noNumber, [undefined, 'undefined']]) {
      throws(() => a.semaphore('n', wrong(limit)), `${rule} ${shown}`)
    }
    for (const limit of [{}, { limit: 5 }, { maxConcurrent: 5 }, { permits: 5 }]) {
      throws(() => a.semaphore('n', wrong(limit)), `${rule} an object${pass}`)
    }
    for (const [name, shown] of [
      [undefined, 'undefined'],
      [5, '5'],
      [['n'], 'an array'],
    ]) {
      throws(() => a.semaphore(wrong(name), 5), `name must be a string, got ${shown}`)
      throws(() => a.readWriteLock(wrong(name)), `name must be a string, got ${shown}`)
    }
    throws(() => a.semaphore('\ud800', 5), /^name must be well-formed Unicode/)
  })

  test('bad options and callbacks reject, and nothing is sent', async (store) => {
    const [a, b] = await store.connectAll(2)
    const held = await b.semaphore('n', 5).acquire()
    const semaphore = a.semaphore('n', 5)
    const { read } = a.readWriteLock('n')
    const call = (options) => [
      semaphore.acquire(options),
      semaphore.tryAcquire(options),
      semaphore.using(options, () => assert.fail('fn was called')),
      semaphore.tryUsing(options, () => assert.fail('fn was called')),
    ]
    const messages = async (calls) => {
      const errors = await Promise.all(calls.map((promise) => rejects(promise, 'LOCK_INVALID_ARGUMENT')))
      return [...new Set(errors.map(({ message }) => message))]
    }
    const rule = 'permits must be a whole number from 1 to the limit, which is 5, got'
    for (const [permits, shown] of [...noNumber, [6, '6'], [{ permits: 1 }, 'an object']]) {
      assert.deepEqual(await messages(call({ permits })), [`${rule} ${shown}`])
    }
    for (const [options, shown] of [
      [5, '5'],
      ['n', '"n"'],
      [[], 'an array'],
    ]) {
      assert.deepEqual(await messages(call(options)), [`options must be a plain object, got ${shown}`])
    }
    for (const ttlMs of [0, '5 minutes']) assert.match((await messages(call({ ttlMs })))[0], /^ttlMs must be /)
    assert.match((await messages([read.acquire(wrong({ permits: 1 }))]))[0], /^options may have ttlMs, /)
    const jobs = [
      semaphore.using(wrong(undefined)),
      semaphore.tryUsing({}, wrong(5)),
      read.using(undefined, wrong('fn')),
    ]
    assert.equal(
      (await messages(jobs)).every((message) => message.startsWith('fn must be a function')),
      true,
    )
    const empty = a.semaphore('', 5)
    assert.deepEqual(await messages([empty.acquire(), empty.inspect(), empty.forceRelease()]), [
      'name must not be empty, got ""',
    ])
    await rejects(a.withPrefix('p:').readWriteLock('').write.tryAcquire(), 'LOCK_INVALID_ARGUMENT')
    await rejects(a.semaphore('n'.repeat(513), 1).acquire(), 'LOCK_INVALID_ARGUMENT')
    const zero = { held: 0, waiting: 0, acquired: 0, busy: 0, released: 0, renewed: 0, lost: 0, storeErrors: 0 }
    assert.deepEqual(a.stats(), zero)
    assert.equal((await b.semaphore('n', 5).inspect()).used, 1)
    assert.equal(await held.release(), true)
  })

  test('words of other libraries are understood', async (store) => {
    const a = await store.connect()
    const meant = async (promise) => {
      const { message } = await rejects(promise, 'LOCK_INVALID_ARGUMENT')
      return /\(did you mean (.*)\?\), got/.exec(message)?.[1]
    }
    const of = (name) => `${name} of locks.semaphore(name, limit)`
    for (const word of ['limit', 'maxConcurrent', 'concurrency', 'maxCount', 'count', 'max']) {
      const options = wrong({ [word]: 5 })
      assert.equal(await meant(a.acquire('n', options)), of('limit'), word)
      assert.equal(await meant(a.semaphore('n', 5).acquire(options)), of('limit'), word)
    }
    for (const word of ['n', 'weight', 'tokens', 'permits']) {
      const options = wrong({ [word]: 5 })
      assert.equal(await meant(a.using('n', options, () => {})), of('permits'), word)
      if (word !== 'permits') assert.equal(await meant(a.semaphore('n', 5).tryAcquire(options)), 'permits', word)
    }
    assert.equal(await meant(a.semaphore('n', 5).acquire(wrong({ ttl: 5 }))), 'ttlMs')
  })

  test('maxLeaders of elect is a whole number, and 1 is a lock', async (store) => {
    const a = await store.connect()
    const rule = 'maxLeaders must be a whole number from 1 to 1048576, got'
    for (const [maxLeaders, shown] of [...noNumber, [{ limit: 5 }, 'an object']]) {
      throws(() => a.elect('n', wrong({ maxLeaders }), () => {}), `${rule} ${shown}`)
    }
    for (const word of ['limit', 'count', 'leaders']) {
      throws(() => a.elect('n', wrong({ [word]: 3 }), () => {}), /\(did you mean maxLeaders\?\), got/)
    }
    for (const maxLeaders of [undefined, 1]) {
      const election = a.elect(
        'n',
        { maxLeaders },
        ({ signal }) => new Promise((resolve) => (signal.onabort = resolve)),
      )
      await until('a leader', () => election.isLeader)
      assert.equal((await a.inspect('n'))?.fencingToken, election.term)
      assert.equal((await a.semaphore('n', 5).inspect()).used, 0)
      await election.stop()
    }
  })

  test('numbers at the limits are accepted', async (store) => {
    const a = await store.connect()
    for (const [limit, permits] of [
      [1, 1],
      [1_048_576, 1_048_576],
      [1_048_576, undefined],
    ]) {
      const semaphore = a.semaphore('limits', wrong(limit))
      const lock = await semaphore.acquire({ permits })
      assert.equal(lock.permits, permits ?? 1)
      assert.equal((await semaphore.inspect()).limit, limit)
      assert.equal(await lock.release(), true)
    }
  })

  test('the calls may be detached', async (store) => {
    const { semaphore, readWriteLock } = await store.connect()
    const { using, acquire, inspect } = semaphore('detached', 1)
    const { read } = readWriteLock('detached-rw')
    const { tryUsing } = read
    assert.equal(await using(async () => (await inspect()).used), 1)
    assert.equal(await (await acquire()).release(), true)
    assert.deepEqual(await tryUsing(() => 1), { ran: true, value: 1 })
  })
})

describe('onStoreError: run', () => {
  const run = /** @type {const} */ ({ onStoreError: 'run' })

  it('is only for using of a semaphore', async () => {
    const locks = await LockService.connect('memory:')
    const [semaphore, { read, write }] = [locks.semaphore('n', 5), locks.readWriteLock('n')]
    const never = () => assert.fail('fn was called')
    for (const call of [
      semaphore.acquire(wrong(run)),
      semaphore.tryAcquire(wrong(run)),
      semaphore.tryUsing(wrong(run), never),
      read.using(wrong(run), never),
      write.acquire(wrong(run)),
      locks.using('n', wrong(run), never),
      locks.acquire('n', wrong(run)),
      locks.oncePer('n', wrong({ periodMs: 5, ...run }), never),
      LockService.connect('memory:', { defaults: wrong(run) }),
    ]) {
      const { message } = await rejects(call, 'LOCK_INVALID_ARGUMENT')
      assert.match(
        message,
        /onStoreError must be 'fail' or 'wait' \('run' is only for using of a semaphore\), got "run"$/,
      )
    }
    const { message } = await rejects(semaphore.using(wrong({ onStoreError: 'Run' }), never), 'LOCK_INVALID_ARGUMENT')
    assert.equal(message, `onStoreError must be 'fail' or 'wait' or 'run', got "Run"`)
    await semaphore.using(run, async (lock) => {
      assert.deepEqual([lock.isHeld, lock.permits], [true, 1])
      // A busy semaphore is no error of the store.
      await rejects(locks.semaphore('n', 1).using({ ...run, waitMs: 0 }, never), 'LOCK_TIMEOUT')
    })
    await locks.close()
    await rejects(semaphore.using(run, never), 'LOCK_CLOSED')
  })

  it('a job runs without a permit while the store fails, with one warning per outage', async (t) => {
    const folder = mkdtempSync(join(tmpdir(), 'holdfast-run-'))
    const own = join(folder, 'own')
    const breaks = () => {
      rmSync(own, { recursive: true, force: true })
      writeFileSync(own, '')
    }
    /** @type {Error[]} */
    const warnings = []
    const collect = (/** @type {Error & { code?: string }} */ warning) => {
      if (warning.code === 'HOLDFAST_NO_PERMIT') warnings.push(warning)
    }
    process.on('warning', collect)
    breaks()
    const locks = await LockService.connect(`sqlite:${join(own, 'locks.sqlite')}`, { lazy: true, storeTimeoutMs: 1000 })
    t.after(async () => {
      process.off('warning', collect)
      await locks.close()
      rmSync(folder, { recursive: true, force: true })
    })
    const semaphore = locks.semaphore('models', 5)
    const warned = (/** @type {number} */ count) => until(`${count} warnings`, () => warnings.length === count)

    const result = await semaphore.using({ ...run, permits: 2 }, async (lock) => {
      assert.deepEqual([lock.isHeld, lock.permits, lock.remainingMs, lock.fencingToken], [false, 0, 0, 0n])
      assert.deepEqual([lock.name, lock.names, lock.token, lock.signal.aborted], ['models', ['models'], '', false])
      assert.equal(JSON.parse(JSON.stringify(lock)).isHeld, false)
      await rejects(lock.extend(1000), 'LOCK_LOST', {
        message: 'the lock "models" is lost: the job runs without a permit',
      })
      assert.throws(() => lock.transferable(), { code: 'LOCK_INVALID_ARGUMENT' })
      return [await lock.release(), 'ran']
    })
    assert.deepEqual(result, [false, 'ran'])
    const thrown = new Error('from fn')
    assert.equal(
      await rejection(
        locks
          .withPrefix('p:')
          .semaphore('models', 5)
          .using(run, () => Promise.reject(thrown)),
      ),
      thrown,
    )
    await warned(1)
    assert.match(
      warnings[0].message,
      /^a job of the semaphore "models" runs without a permit \(until the store answers, .*\): ./,
    )
    await rejects(
      semaphore.using(() => assert.fail('fn was called')),
      'LOCK_STORE',
    )
    // An abort of the caller is no error of the store, whatever its reason is.
    const reason = await rejects(locks.ping(), 'LOCK_STORE')
    assert.equal(await rejection(semaphore.using({ ...run, signal: AbortSignal.abort(reason) }, () => {})), reason)
    assert.equal(locks.stats().held, 0)
    assert.equal(warnings.length, 1)

    rmSync(own)
    mkdirSync(own)
    await locks.using('n', () => {})
    if (!KINDS.sqlite.shares) return
    assert.equal(await semaphore.using(run, ({ permits }) => permits), 1)
    breaks()
    assert.equal(await semaphore.using(run, ({ permits }) => permits), 0)
    await warned(2)
  })
})

for (const kind of ['redis-quorum', 'mongodb']) {
  suite(kind, 'no semaphores and no read/write locks', (test) => {
    test('every call is an error that names the stores that have them', async (store) => {
      for (const options of [{}, { lazy: true }]) {
        const a = await store.connect(options)
        const semaphore = a.semaphore('n', 5)
        const { read, write, inspect, forceRelease } = a.readWriteLock('n')
        const calls = [
          () => semaphore.acquire(),
          () => semaphore.tryAcquire({ permits: 5 }),
          () => semaphore.using(() => assert.fail('fn was called')),
          () => semaphore.tryUsing(() => assert.fail('fn was called')),
          () => semaphore.inspect(),
          () => semaphore.forceRelease(),
          () => read.acquire({ onStoreError: 'wait' }),
          () => write.acquire({ waitMs: Infinity }),
          () => a.elect('n', { maxLeaders: 3, restart: true }, () => assert.fail('it leads')).done,
          inspect,
          forceRelease,
        ]
        for (const call of calls) {
          const { message } = await rejects(call(), 'LOCK_INVALID_ARGUMENT', { retryable: false })
          assert.match(
            message,
            /^the store must keep a queue of waiters for a semaphore or a read\/write lock \(memory, /,
          )
          for (const name of [
            'SQLite',
            'PostgreSQL',
            'MariaDB',
            'Sentinel',
            'MongoDB replica set',
            'etcd',
            'ZooKeeper',
          ])
            assert.ok(message.includes(name), `${name}: ${message}`)
          assert.match(message, /, got (redis|mongodb).*: a standalone MongoDB and a Redis quorum keep none$/)
        }
        const { held, acquired, waiting, busy } = a.stats()
        assert.deepEqual([held, acquired, waiting, busy], [0, 0, 0, 0])
        assert.equal(await a.using('n', () => 'a lock'), 'a lock')
      }
    })
  })
}

it('the kinds without a queue are those without semaphores', () => {
  for (const [kind, { ordered, shares }] of Object.entries(KINDS)) assert.ok(ordered || !shares, kind)
})
