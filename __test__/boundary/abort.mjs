// The caller's AbortSignal: it cancels the wait with its reason, and no listener remains.
import assert from 'node:assert/strict'
import { getEventListeners } from 'node:events'
import { assertFree, block, rejection, rejects, sleep, until, waiting } from '../tools.mjs'

const listeners = (signal) => getEventListeners(signal, 'abort').length

/** After an abort the listener is removed when the native call has ended, a moment later. */
const noListener = (signal) => until('the listener is gone', () => listeners(signal) === 0)

export function abort(test) {
  const ways = {
    acquire: (service, name, signal) => service.acquire(name, { waitMs: Infinity, signal }),
    tryAcquire: (service, name, signal) => service.tryAcquire(name, { signal }),
    using: (service, name, signal) => service.using(name, { waitMs: Infinity, signal }, () => 'ran'),
    acquireAndExecute: (service, name, signal) =>
      service.acquireAndExecute({ name, waitMs: Infinity, signal }, () => 'ran'),
  }

  for (const [way, call] of Object.entries(ways)) {
    test(`${way}: aborted before`, async (place) => {
      const a = await place.connect()
      const reasons = [new Error('mine'), 'text', 0, null, false, Symbol('reason'), { any: 'object' }, () => {}]
      for (const reason of reasons) {
        const signal = AbortSignal.abort(reason)
        assert.equal(await rejection(call(a, 'never', signal)), reason)
        assert.equal(listeners(signal), 0)
      }
      assert.equal((await rejection(call(a, 'never', AbortSignal.abort()))).name, 'AbortError')
      assert.equal(a.stats().acquired, 0)
      assert.equal(a.stats().busy, 0)
      assert.equal(await a.inspect('never'), null)
    })

    test(`${way}: no listener remains after the call`, async (place) => {
      const [a, b] = await place.connectAll(2)
      const { signal } = new AbortController()
      const free = await call(a, 'free', signal)
      assert.equal(listeners(signal), 0)
      await free.release?.()
      const lock = await a.acquire('busy')
      const short = {
        acquire: () => rejects(b.acquire('busy', { waitMs: 5, signal }), 'LOCK_TIMEOUT'),
        tryAcquire: () => b.tryAcquire('busy', { signal }),
        using: () =>
          rejects(
            b.using('busy', { waitMs: 5, signal }, () => {}),
            'LOCK_TIMEOUT',
          ),
        acquireAndExecute: () => b.acquireAndExecute({ name: 'busy', waitMs: 5, signal }, () => {}),
      }
      await short[way]()
      assert.equal(listeners(signal), 0)
      await lock.release()
      await b.close()
      await rejects(call(b, 'free', signal), 'LOCK_CLOSED')
      assert.equal(listeners(signal), 0)
    })
  }

  for (const way of ['acquire', 'using', 'acquireAndExecute']) {
    test(`${way}: aborted while it waits`, async (place) => {
      const [a, b] = await place.connectAll(2)
      const lock = await a.acquire('busy')
      for (const reason of [new Error('mine'), 'text', 0, null, { any: 'object' }]) {
        const controller = new AbortController()
        const outcome = rejection(ways[way](b, 'busy', controller.signal))
        await waiting(b, 1)
        assert.equal(listeners(controller.signal), 1)
        controller.abort(reason)
        assert.equal(await outcome, reason)
        await noListener(controller.signal)
        await waiting(b, 0)
      }
      await lock.release()
      await assertFree(b, 'busy')
    })
  }

  test('AbortSignal.timeout ends a wait with its TimeoutError', async (place) => {
    const [a, b] = await place.connectAll(2)
    const lock = await a.acquire('busy')
    const signal = AbortSignal.timeout(30)
    const error = await rejection(b.acquire('busy', { waitMs: Infinity, signal }))
    assert.equal(error, signal.reason)
    assert.equal(error.name, 'TimeoutError')
    await lock.release()
  })

  test('one signal ends many waits', async (place) => {
    const [a, b] = await place.connectAll(2)
    const lock = await a.acquire('busy')
    const controller = new AbortController()
    const waits = Array.from({ length: 5 }, () => b.acquire('busy', { waitMs: Infinity, signal: controller.signal }))
    await waiting(b, 5)
    const reason = new Error('all of them')
    controller.abort(reason)
    assert.deepEqual(
      await Promise.all(waits.map(rejection)),
      waits.map(() => reason),
    )
    await lock.release()
    await assertFree(a, 'busy')
  })

  test('an abort after the grant changes nothing', async (place) => {
    const [a, b] = await place.connectAll(2)
    const controller = new AbortController()
    const lock = await a.acquire('mine', { signal: controller.signal })
    const ran = a.using('ran', { signal: controller.signal }, async (held) => {
      controller.abort()
      await sleep(20)
      assert.equal(held.isHeld, true)
      assert.equal(held.signal.aborted, false)
      return 'done'
    })
    assert.equal(await ran, 'done')
    assert.equal(lock.isHeld, true)
    assert.equal(await b.tryAcquire('mine'), null)
    assert.equal(await lock.release(), true)
  })

  test('an abort in the tick of the grant leaves no lock behind', async (place) => {
    const [a, b] = await place.connectAll(2)
    for (const [way, call] of Object.entries(ways)) {
      const controller = new AbortController()
      const outcome = rejection(call(a, `tick:${way}`, controller.signal))
      // The native thread receives the grant while this one is busy: the abort comes before the promise is settled.
      block(100)
      const reason = new Error('too late')
      controller.abort(reason)
      assert.equal(await outcome, reason)
      await noListener(controller.signal)
      await until('the lock is released', async () => (await b.inspect(`tick:${way}`)) === null)
    }
    assert.ok(a.stats().acquired > 0, 'the grant must come before the abort')
    assert.equal(a.stats().held, 0)
  })

  test('an object with the members of a signal is accepted', async (place) => {
    const [a, b] = await place.connectAll(2)
    const lock = await a.acquire('busy')
    const added = []
    const signal = {
      aborted: false,
      reason: undefined,
      addEventListener: (type, listener) => added.push([type, listener]),
      removeEventListener: (type, listener) => {
        added.splice(
          added.findIndex(([t, l]) => t === type && l === listener),
          1,
        )
      },
    }
    const outcome = rejection(b.acquire('busy', { signal }))
    await waiting(b, 1)
    assert.equal(added.length, 1)
    const [type, listener] = added[0]
    assert.equal(type, 'abort')
    listener()
    assert.equal(await outcome, undefined)
    await until('the listener is gone', () => added.length === 0)
    listener()
    await lock.release()
  })

  test('a signal that throws rejects the call with what it threw', async (place) => {
    const a = await place.connect()
    const thrown = new Error('from the signal')
    const fail = () => {
      throw thrown
    }
    const whole = { aborted: false, addEventListener() {}, removeEventListener() {} }
    const broken = [
      Object.defineProperty({ ...whole }, 'aborted', { get: fail }),
      Object.defineProperty({ ...whole }, 'addEventListener', { get: fail }),
      { ...whole, addEventListener: fail },
      Object.defineProperty({ ...whole, aborted: true }, 'reason', { get: fail }),
    ]
    for (const signal of broken) assert.equal(await rejection(a.acquire('x', { signal })), thrown)
    assert.equal(await a.inspect('x'), null)
    const lock = await a.acquire('x', { signal: { ...whole, removeEventListener: fail } })
    assert.equal(await lock.release(), true)
  })

  test('each property of a lock’s signal shows a loss in the same tick', async (place) => {
    const a = await place.connect()
    const reads = {
      aborted: (signal) => signal.aborted && 'LOCK_LOST',
      reason: (signal) => signal.reason?.code,
      throwIfAborted(signal) {
        try {
          signal.throwIfAborted()
        } catch (error) {
          return error.code
        }
      },
    }
    for (const [property, read] of Object.entries(reads)) {
      const lock = await a.acquire(property, { ttlMs: 1500, renew: false })
      const { signal } = lock
      assert.equal(signal.aborted, false)
      // The blocked event loop has delivered no event.
      block(1600)
      assert.equal(read(signal), 'LOCK_LOST', property)
      assert.equal(lock.isHeld, false)
    }
  })

  test('the signal of a lock that is released or lost is an ordinary one', async (place) => {
    const [a, b] = await place.connectAll(2)
    const own = (signal) => Object.getOwnPropertyNames(signal)
    const lock = await a.acquire('released')
    const { signal } = lock
    assert.deepEqual(own(signal), ['aborted', 'reason', 'throwIfAborted'])
    await lock.release()
    assert.deepEqual([own(signal), signal.aborted, signal.reason], [[], false, undefined])
    assert.equal(lock.signal, signal)
    const late = await a.acquire('late')
    await late.release()
    assert.deepEqual([own(late.signal), late.signal.aborted], [[], false])
    let used
    await a.using('used', (held) => void (used = held.signal))
    assert.deepEqual([own(used), used.aborted], [[], false])
    const lost = await a.acquire('lost', { ttlMs: 600 })
    let isAborted = false
    lost.signal.addEventListener('abort', () => (isAborted = true))
    await b.forceRelease('lost')
    await until('the abort', () => isAborted)
    assert.deepEqual([own(lost.signal), lost.signal.aborted, lost.signal.reason.code], [[], true, 'LOCK_LOST'])
  })

  test('a lock’s signal works as an argument of other functions', async (place) => {
    const [a, b] = await place.connectAll(2)
    const busy = await b.acquire('busy')
    const lock = await a.acquire('lost', { ttlMs: 300 })
    const any = AbortSignal.any([lock.signal, new AbortController().signal])
    const wait = rejection(a.acquire('busy', { waitMs: Infinity, signal: lock.signal }))
    const nap = rejection(sleep(60_000, undefined, { signal: any }))
    await b.forceRelease('lost')
    const reason = await wait
    assert.equal(reason.code, 'LOCK_LOST')
    assert.equal(reason, lock.signal.reason)
    assert.equal((await nap).cause, reason)
    assert.equal(any.reason, reason)
    assert.equal(await busy.release(), true)
  })
}
