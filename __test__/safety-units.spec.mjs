// Units: durations as text everywhere, and one warning for a ttl that is probably in the wrong unit.
import assert from 'node:assert/strict'
import { it } from 'node:test'
import { LockService } from '../index.js'
import { INDEX, output } from './tools.mjs'

/** Runs `body` with a service `locks` in a process, and returns the warnings. */
const warnings = (body, connect = `'memory:'`) =>
  output(`
    import { LockService } from '${INDEX}'
    process.on('warning', ({ name, code, message }) => console.log(name, code, message))
    const locks = await LockService.connect(${connect})
    ${body}
    await new Promise(setImmediate)
    await locks.close()`)

it('every duration may be text with a unit', async () => {
  const locks = await LockService.connect('memory:units', {
    storeTimeoutMs: '2s',
    defaults: { ttlMs: '1m', waitMs: '0s', maxHoldMs: '1h', stallLimitMs: '5m', minHoldMs: '0ms' },
  })
  const lock = await locks.acquire('n', { ttlMs: '30s', waitMs: '250ms', maxHoldMs: '1h', stallLimitMs: '1m' })
  await lock.extend('1m')
  assert.ok(lock.remainingMs > 30_000)
  await lock.release()
  await locks.tryUsing('n', { waitMs: '1s', minHoldMs: '1ms' }, () => {})
  await locks.acquireAndExecute({ name: 'm', ttlMs: '1s', waitMs: '1s', minHoldMs: '1ms' }, () => {})
  await locks.close({ drainMs: '1s' })
})

it('a ttl above 24 h emits one warning with both readings', async () => {
  const twice = (call) => `for (let i = 0; i < 2; i++) { ${call} }`
  for (const [call, reading] of [
    [
      `await (await locks.acquire('n', { ttlMs: 90_000_000 })).release()`,
      'ttlMs: 90000000 ms is 25 h; did you mean 90000?',
    ],
    [
      `await locks.acquireLock('n', 90_000); await locks.releaseLock('n')`,
      'ttlSeconds: 90000 s is 25 h; did you mean 90?',
    ],
    [
      `await locks.acquireLock('n', 30_000); await locks.releaseLock('n')`,
      'ttlSeconds: 30000 s is 8.3 h; did you mean 30?',
    ],
    [`await locks.acquireAndExecute('n', 30_000, () => {})`, 'ttlSeconds: 30000 s is 8.3 h; did you mean 30?'],
    [`await locks.using('n', (lock) => lock.extend('48h'))`, 'ttlMs: 48h is 48 h. '],
  ]) {
    const seen = await warnings(twice(call))
    assert.ok(seen.startsWith(`HoldfastWarning HOLDFAST_TTL ${reading}`), seen)
    assert.equal(seen.split('\n').length, 1, seen)
  }
  const defaults = `'memory:', { defaults: { ttlMs: 30_000_000_0 } }`
  assert.match(
    await warnings('', defaults),
    /^HoldfastWarning HOLDFAST_TTL ttlMs: 300000000 ms is 83.3 h; did you mean 300000\?/,
  )
})

it('a ttl below 100 ms with renewal emits one warning with both readings', async () => {
  const long = await warnings(`for (let i = 0; i < 2; i++) await (await locks.acquire('n', { ttlMs: 30 })).release()`)
  assert.match(long, /^HoldfastWarning HOLDFAST_TTL ttlMs: 30 ms is 0.03 s; did you mean 30000\?[^\n]*$/)
  const gist = await warnings(`await locks.acquireAndExecute({ name: 'n', ttlSeconds: 0.05, renew: true }, () => {})`)
  assert.match(gist, /^HoldfastWarning HOLDFAST_TTL ttlSeconds: 0.05 s is 50 ms; did you mean 50\?/)
})

it('an ordinary ttl emits no warning', async () => {
  const calls = `
    for (const ttlMs of [100, 30_000, '24h', 86_400_000]) await (await locks.acquire('n', { ttlMs })).release()
    await (await locks.acquire('n', { ttlMs: 50, renew: false })).release()
    for (const seconds of [0.05, 60, 7200, 36_000, 86_400]) await locks.acquireAndExecute('n', seconds, () => {})`
  assert.equal(await warnings(calls), '')
  assert.equal(
    await warnings(
      `await (await locks.acquire('n')).release()`,
      `'memory:', { defaults: { ttlMs: 50, renew: false } }`,
    ),
    '',
  )
})
