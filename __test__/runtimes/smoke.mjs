// A smoke test of the API, for any runtime: `smoke.mjs MODULE URL…`. MODULE is what it imports. Needs no package and no test runner.
import { setTimeout as sleep } from 'node:timers/promises'

const [module, ...urls] = process.argv.slice(2)
const { LockService, LockError, isLockError } = await import(module)
const SOON_MS = 3000

function check(what, isTrue) {
  if (!isTrue) throw new Error(`not true: ${what}`)
}

async function rejects(what, promise, code) {
  const thrown = await promise.then(
    () => undefined,
    (error) => error,
  )
  check(
    `${what} rejects with ${code}, and not with ${thrown}`,
    isLockError(thrown, code) && thrown instanceof LockError,
  )
}

/** Waits until `isTrue` returns true. */
async function until(what, isTrue) {
  for (const end = performance.now() + 15_000; !isTrue(); await sleep(10)) check(what, performance.now() < end)
}

const CASES = {
  async 'acquire, tryAcquire, release and fencing tokens'(a, b) {
    const first = await a.acquire('one')
    check('held', first.isHeld && first.remainingMs > 0)
    check('busy', (await b.tryAcquire('one')) === null)
    check('released', await first.release())
    check('released once', !(await first.release()))
    const second = await b.acquire('one')
    check('a larger fencing token', second.fencingToken > first.fencingToken)
    await second.release()
  },
  async 'several names'(a, b) {
    const lock = await a.acquire(['x', 'y'])
    check('all are busy', (await b.tryAcquire(['y', 'z'])) === null)
    check('nothing is left of a failed attempt', await b.acquireLock('z'))
    await Promise.all([lock.release(), b.releaseLock('z')])
  },
  async 'a waiter is notified of a release'(a, b) {
    const lock = await a.acquire('waited')
    const next = b.acquire('waited', { waitMs: 60_000 })
    await until('it waits', () => b.stats().waiting === 1)
    const began = performance.now()
    await lock.release()
    await (await next).release()
    check('soon', performance.now() - began < SOON_MS)
  },
  async 'waiters of one process are served in their order'(a) {
    const order = []
    const calls = Array.from({ length: 20 }, (_, i) => a.using('queue', { waitMs: 60_000 }, () => order.push(i)))
    await Promise.all(calls)
    check(
      `the order of the calls: ${order}`,
      order.every((i, at) => i === at),
    )
  },
  async 'timeouts, cancelled calls and invalid arguments'(a, b) {
    const lock = await a.acquire('busy')
    await rejects('a wait', b.acquire('busy', { waitMs: 50 }), 'LOCK_TIMEOUT')
    await rejects('no name', b.acquire(''), 'LOCK_INVALID_ARGUMENT')
    const cancel = new AbortController()
    const call = b.acquire('busy', { signal: cancel.signal, waitMs: Infinity }).catch((reason) => reason)
    await until('it waits', () => b.stats().waiting === 1)
    cancel.abort(new Error('mine'))
    check('the reason of the signal', (await call).message === 'mine')
    await lock.release()
    // An attempt that was in progress is rolled back in the background.
    await (await a.acquire('busy', { waitMs: SOON_MS })).release()
  },
  async 'using, with an error of its function'(a, b) {
    check('the result', (await a.using('job', (lock) => lock.isHeld)) === true)
    const thrown = await a.using('job', () => Promise.reject(new TypeError('mine'))).catch((error) => error)
    check('the same error', thrown instanceof TypeError)
    check('released', await b.acquireLock('job'))
    await b.releaseLock('job')
  },
  async 'renewal, extend, inspect and list'(a, b) {
    const lock = await a.acquire('renewed', { ttlMs: 2500, metadata: { of: 'smoke' } })
    await until('renewed twice', () => a.stats().renewed >= 2)
    check('held', lock.isHeld)
    await lock.extend(60_000)
    const info = await b.inspect('renewed')
    check('inspected', info.remainingMs > 30_000 && info.fencingToken === lock.fencingToken)
    check('metadata', info.metadata.of === 'smoke' && info.holder.pid === process.pid)
    check('listed', (await b.list({ prefix: 'renewed' })).length === 1)
    await lock.release()
  },
  async 'expiry, and a lost lock'(a, b) {
    check('granted', await a.acquireLock('expires', 1.5))
    await (await b.acquire('expires', { waitMs: 60_000 })).release()
    const lock = await a.acquire('lost', { ttlMs: 1500 })
    let reason
    lock.signal.addEventListener('abort', () => (reason = lock.signal.reason))
    await b.forceRelease('lost')
    await until('the signal aborts', () => reason !== undefined)
    check('the signal has the reason', isLockError(reason, 'LOCK_LOST') && !lock.isHeld)
  },
  async 'three hundred calls in one tick'(a) {
    const held = await Promise.all(Array.from({ length: 300 }, (_, i) => a.acquireLock(`many${i}`)))
    check('all are granted', held.every(Boolean))
    const released = await Promise.all(held.map((_, i) => a.releaseLock(`many${i}`)))
    check('all are released', released.every(Boolean))
  },
  async close(a, b) {
    const lock = await a.acquire('closing')
    const waits = rejects('the wait of a closed service', a.acquire('closing', { waitMs: Infinity }), 'LOCK_CLOSED')
    await until('it waits', () => a.stats().waiting === 1)
    await a.close()
    await waits
    check('aborted', lock.signal.aborted)
    await rejects('a late call', a.acquire('late'), 'LOCK_CLOSED')
    check('nothing is left', (await b.list()).length === 0)
    await b.close()
  },
}

for (const url of urls) {
  const target = url.includes(',') ? url.split(',') : url
  const options = /^(memory|sqlite):/.test(url) ? {} : { keyPrefix: `smoke:${process.pid}:${performance.now()}:` }
  const [a, b] = await Promise.all([LockService.connect(target, options), LockService.connect(target, options)])
  for (const [name, run] of Object.entries(CASES)) {
    await run(a, b).catch((error) => {
      throw new Error(`${url.split(':')[0]}: ${name}: ${error.stack ?? error}`)
    })
  }
  console.log(`${url.split(':')[0]}: ${Object.keys(CASES).length} cases passed`)
}
// The process ends by itself: nothing keeps it alive.
