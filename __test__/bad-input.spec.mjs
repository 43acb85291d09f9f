// Bad input: each call is rejected with a code and a message that names the argument and shows the value. Nothing is sent to
// the store.
import assert from 'node:assert/strict'
import { it } from 'node:test'
import { inspect } from 'node:util'
import { LockService } from '../index.js'
import { calls, extensions, tokens } from './bad-input/calls.mjs'
import { connections, secret } from './bad-input/connections.mjs'
import { connectWith, KINDS, suite } from './stores.mjs'
import { assertLockError, rejection, rejects, wrong } from './tools.mjs'

/** Runs one bad call. Returns what is wrong with its rejection, if anything. */
async function complaint(call, argument, isShown) {
  try {
    const promise = call()
    assert.ok(promise instanceof Promise, 'it must return a promise')
    const error = await rejection(promise)
    assertLockError(error, 'LOCK_INVALID_ARGUMENT', { retryable: false, key: undefined, engine: undefined })
    assert.ok(error.message.startsWith(`${argument} `), `it must name ${argument}: ${error.message}`)
    assert.ok(isShown(error.message), `it must show the value: ${error.message}`)
  } catch (failure) {
    return failure.message
  }
}

const onOneLine = { depth: 3, compact: 9, breakLength: Infinity, maxStringLength: 60, maxArrayLength: 5 }
const show = (value) => inspect(value, onOneLine)
const noComplaints = (complaints) => assert.ok(complaints.length === 0, `\n${complaints.join('\n')}`)

/** Runs all rows of a table, and reports all that fail. */
async function rejectsAll(rows, perform, isShown) {
  const complaints = []
  for (const row of rows) {
    const [call, argument, shown] = perform(row)
    const text = await complaint(call, argument, (message) => isShown(message, shown))
    if (text) complaints.push(`${show(row)}: ${text}`)
  }
  noComplaints(complaints)
}

for (const kind of Object.keys(KINDS)) {
  suite(kind, 'bad input', (test, { mostNames = 1000 }) => {
    test('every bad call is rejected, and the store is unchanged', async (place, t) => {
      const [a, b] = await place.connectAll(2)
      const lock = await b.acquire('held', { metadata: { untouched: true } })
      const before = await b.inspect('held')
      const rows = calls(lock.transferable())
      assert.ok(rows.length >= 100)
      t.diagnostic(`${rows.length} bad calls`)
      const exactly = (message, shown) => message.endsWith(`, got ${shown}`)
      await rejectsAll(rows, ([name, args, argument, shown]) => [() => a[name](...args), argument, shown], exactly)
      await rejectsAll(extensions, ([ttlMs, shown]) => [() => lock.extend(ttlMs), 'ttlMs', shown], exactly)
      const json = lock.transferable()
      await rejectsAll(
        tokens,
        (token) => [() => a.restore({ ...json, token }), 'token', token],
        (message, token) => {
          return token.length < 4 || !message.includes(token)
        },
      )

      const zero = { held: 0, waiting: 0, acquired: 0, busy: 0, released: 0, renewed: 0, lost: 0, storeErrors: 0 }
      assert.deepEqual(a.stats(), zero)
      const after = await b.inspect('held')
      assert.deepEqual({ ...after, remainingMs: 0 }, { ...before, remainingMs: 0 })
      assert.deepEqual(
        (await a.list()).map((info) => info.name),
        ['held'],
      )
      assert.equal(await lock.release(), true)
      assert.deepEqual(await a.list(), [])
    })

    test('values at the limits are accepted', async (place) => {
      const a = await place.connect()
      const goodOnes = [
        { ttlMs: 2 ** 31 },
        { ttlMs: 1234.5 },
        { waitMs: 0 },
        { waitMs: Infinity },
        { waitMs: 2 ** 53 },
        { waitMs: 1e300 },
        { ttlMs: '30s' },
        { ttlMs: '1500ms', waitMs: '0s' },
        { ttlMs: '0.5h', maxHoldMs: '1.5m', minHoldMs: '0ms' },
        { maxHoldMs: 2 ** 31 },
        { stallLimitMs: 2 ** 31 },
        { minHoldMs: 0 },
        { minHoldMs: -0 },
        { metadata: 'm'.repeat(16_382) },
        { ttlMs: undefined, waitMs: undefined, renew: undefined, signal: undefined },
        {},
        undefined,
      ]
      for (const options of goodOnes) {
        const lock = await a.acquire('good', options)
        assert.equal(await lock.release(), true, inspect(options))
      }
      assert.equal(await a.acquireLock('good', 2147483.648), true)
      assert.equal(await a.releaseLock('good'), true)
      const many = Array.from({ length: mostNames }, (_, i) => `n${i}`)
      assert.equal(await (await a.acquire(many, { ttlMs: 600_000 })).release(), true)
    })
  })
}

it('durations may be text with a unit, and the error of a misspelt option suggests the right one', async () => {
  const locks = await LockService.connect('memory:durations', { storeTimeoutMs: '2s', defaults: { ttlMs: '1m' } })
  /** @type {[import('../index.js').Duration | undefined, number][]} */
  const durations = [
    ['250ms', 250],
    ['30s', 30_000],
    ['1.5m', 90_000],
    ['1h', 3_600_000],
    [undefined, 60_000],
  ]
  for (const [ttlMs, expected] of durations) {
    const lock = await locks.acquire('n', { ttlMs, renew: false })
    assert.equal(lock.transferable().ttlMs, expected)
    await lock.release()
  }
  const lock = await locks.acquire('n', { renew: false })
  await lock.extend('2h')
  assert.ok(lock.remainingMs > 7_000_000)
  await lock.release()
  const suggestions = {
    ttl: 'ttlMs',
    TTLMS: 'ttlMs',
    wait: 'waitMs',
    timeout: 'waitMs',
    duration: 'ttlMs',
    maxHold: 'maxHoldMs',
  }
  for (const [name, meant] of Object.entries(suggestions)) {
    const { message } = await rejects(locks.acquire('n', { [name]: 5 }), 'LOCK_INVALID_ARGUMENT')
    assert.ok(message.endsWith(` (did you mean ${meant}?), got "${name}"`), message)
  }
  const { message } = await rejects(locks.acquire('n', wrong({ colour: 5 })), 'LOCK_INVALID_ARGUMENT')
  assert.doesNotMatch(message, /did you mean/)
  await locks.close()
})

it('every bad connection is rejected, and no password is shown', async () => {
  // A call that counts as one without a target must not reach the store of this user.
  process.env.HOLDFAST_URL = 'memory:bad-input'
  const complaints = []
  for (const [args, argument, shown] of connections) {
    const error = await connectWith(...args).then(
      (service) => service.close().then(() => new Error('it connected')),
      (thrown) => thrown,
    )
    try {
      assertLockError(error, 'LOCK_INVALID_ARGUMENT', { retryable: false })
      assert.ok(error.message.startsWith(`${argument} `), `it must name ${argument}: ${error.message}`)
      assert.match(error.message, shown)
      assert.ok(!inspect(error, { depth: 9, showHidden: true }).includes(secret), 'the password is shown')
    } catch (failure) {
      complaints.push(`${show(args)}: ${failure.message}`)
    }
  }
  delete process.env.HOLDFAST_URL
  noComplaints(complaints)
})

it('a store that cannot be reached is LOCK_STORE, and no password is shown', async () => {
  for (const [url, engine] of [
    [`redis://user:${secret}@127.0.0.1:1`, 'redis'],
    [`mongodb://user:${secret}@127.0.0.1:1/db`, 'mongodb'],
    ['sqlite:/dev/null/never/locks.sqlite', 'sqlite'],
  ]) {
    const call = LockService.connect(url, { storeTimeoutMs: 800 })
    const error = await rejects(call, 'LOCK_STORE', { engine })
    assert.ok(error.cause instanceof Error, engine)
    assert.ok(!inspect(error, { depth: 9, showHidden: true }).includes(secret), 'the password is shown')
  }
})
