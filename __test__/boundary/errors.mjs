// The error model: an Error with a code.
import assert from 'node:assert/strict'
import { tracingChannel } from 'node:diagnostics_channel'
import { hostname } from 'node:os'
import { inspect } from 'node:util'
import { Election, isLockError, Lock, LockError, LockService } from '../../index.js'
import { assertLockError, INDEX, rejection, rejects, runNode, timed, wrong } from '../tools.mjs'

export function errors(test) {
  test('an error has the properties of its type', async (place) => {
    const [a, b] = await place.connectAll(2)
    const lock = await a.acquire('busy')
    const error = await rejects(b.acquire('busy', { waitMs: 5 }), 'LOCK_TIMEOUT', { key: 'busy', retryable: true })
    assert.equal(Object.getPrototypeOf(error), LockError.prototype)
    assert.equal(Object.getPrototypeOf(LockError.prototype), Error.prototype)
    assert.deepEqual(Object.keys(LockError.prototype), [])
    assert.equal(Object.prototype.toString.call(error), '[object Error]')
    assert.equal(String(error), `LockError: ${error.message}`)
    assert.deepEqual(Object.keys(error), ['code', 'retryable', 'key', 'holder', 'remainingMs'])
    assert.match(String(error.stack), /^LockError \[LOCK_TIMEOUT\]: .*busy/)
    assert.match(inspect(error), /LOCK_TIMEOUT/)
    assert.equal('cause' in error, false)
    assert.equal('engine' in error, false)
    const holder = `it is held by this process (pid ${process.pid} on ${hostname()})`
    assert.equal(error.message, `the lock "busy" was still busy after 5 ms: ${holder}`)
    await lock.release()
  })

  test('each code, with its key and retryable', async (place) => {
    const [a, b] = await place.connectAll(2)
    const lock = await a.acquire('coded')
    await rejects(b.acquire(['coded', 'more'], { waitMs: 0 }), 'LOCK_TIMEOUT', { key: 'coded', retryable: true })
    await rejects(b.acquire(''), 'LOCK_INVALID_ARGUMENT', { key: undefined, retryable: false, cause: undefined })
    await b.forceRelease('coded')
    await rejects(lock.extend(1000), 'LOCK_LOST', { key: 'coded', retryable: false })
    assertLockError(lock.signal.reason, 'LOCK_LOST', { key: 'coded', retryable: false })
    await b.close()
    await rejects(b.acquire('coded'), 'LOCK_CLOSED', { retryable: false })
  })

  test('acquire waits 10 s by default', async (place) => {
    const [a, b] = await place.connectAll(2)
    const lock = await a.acquire('default')
    const call = rejects(b.acquire('default'), 'LOCK_TIMEOUT')
    const other = rejects(
      b.using('default', {}, () => assert.fail('fn was called')),
      'LOCK_TIMEOUT',
    )
    assert.ok((await timed(call)) >= 9900)
    assert.match((await call).message, /10000 ms/)
    await other
    await lock.release()
  })

  test('a message shows an odd name safely', async (place) => {
    const [a, b] = await place.connectAll(2)
    const name = 'line\nbreak "quoted" \0 鎖'
    const lock = await a.acquire(name)
    const error = await rejects(b.acquire(name, { waitMs: 0 }), 'LOCK_TIMEOUT', { key: name })
    assert.equal(error.message.includes('\n'), false)
    assert.equal(error.message.includes('\0'), false)
    await lock.release()
  })

  test('a rejected promise without a handler is an ordinary unhandled rejection', async () => {
    const code = `
      import { LockService } from '../index.js'
      process.on('unhandledRejection', (error) => console.log(error.code))
      const locks = await LockService.connect('memory:')
      locks.acquire('')
      locks.using('x', () => { throw Object.assign(new Error(), { code: 'from fn' }) })
      setTimeout(() => locks.close(), 50)`
    const { code: status, stdout } = await runNode(code)
    assert.equal(status, 0)
    assert.deepEqual(stdout.trim().split('\n').sort(), ['LOCK_INVALID_ARGUMENT', 'from fn'])
  })

  test('a handled rejection is not reported as unhandled, and nothing is printed', async () => {
    const code = `
      import { LockService } from '../index.js'
      const locks = await LockService.connect('memory:')
      const other = await LockService.connect('memory:')
      const held = await locks.acquire('held')
      const controller = new AbortController()
      const settled = Promise.allSettled([
        other.acquire('held', { waitMs: 20 }), other.acquire('held', { waitMs: Infinity, signal: controller.signal }),
        other.acquire('held', { signal: AbortSignal.abort() }), other.using('held', () => {}), other.acquire(1),
        locks.using('a', () => Promise.reject(undefined)), locks.using('b', () => { throw null }),
        locks.acquireAndExecute('c', async () => { throw new Error() }),
      ])
      setTimeout(() => controller.abort(), 10)
      const lost = await locks.acquire('lost', { ttlMs: 30, renew: false })
      const watched = await locks.acquire('watched', { ttlMs: 30, renew: false })
      watched.signal.aborted
      setTimeout(() => other.close(), 200)
      await settled
      held.release()
      lost.release()
      locks.acquireLock('gist', 0.01).catch(() => {})
      await new Promise((resolve) => setTimeout(resolve, 100))
      await locks.close()
      locks.close()
      held.release()`
    const { code: status, stdout, stderr } = await runNode(code, { flags: ['--unhandled-rejections=strict'] })
    assert.deepEqual({ status, stdout, stderr }, { status: 0, stdout: '', stderr: '' })
  })

  test('a method on the wrong object fails, and does not crash', async () => {
    const code = `
      import { Lock, LockService } from '../index.js'
      const locks = await LockService.connect('memory:')
      const lock = await locks.acquire('x')
      const attempts = [
        () => new Lock(), () => new LockService(), () => LockService(), () => Lock(),
        () => LockService.prototype.acquire.call({}, 'y'), () => LockService.prototype.inspect.call(undefined, 'x'),
        () => LockService.prototype.inspect.call(lock, 'x'), () => LockService.prototype.stats.call(lock),
        () => LockService.prototype.close.call(new Map()), () => LockService.prototype.list.call(Object.create(locks)),
        () => Lock.prototype.release.call({}), () => Lock.prototype.release.call(locks),
        () => Lock.prototype.toJSON.call(locks), () => Lock.prototype.isHeld,
        () => Reflect.get(Lock.prototype, 'name', locks), () => Reflect.get(Lock.prototype, 'token', {}),
        () => { const { release } = lock; return release() },
      ]
      let failed = 0
      for (const attempt of attempts) {
        try { await attempt() } catch (error) { if (error instanceof Error) failed++ }
      }
      console.log(failed === attempts.length, lock.isHeld, (await locks.list()).length)
      await locks.close()`
    const { code: status, stdout, stderr } = await runNode(code)
    assert.deepEqual({ status, stdout: stdout.trim() }, { status: 0, stdout: 'true true 1' }, stderr)
  })

  test('the methods of a service may be detached', async (place) => {
    const a = await place.connect()
    const { acquire, tryAcquire, using, acquireLock, releaseLock, acquireAndExecute, list, stats, restore } = a
    const lock = await acquire('detached')
    assert.equal(await tryAcquire('detached'), null)
    assert.equal((await a.inspect.call(undefined, 'detached')).name, 'detached')
    const theirs = await restore(lock.transferable())
    assert.deepEqual(
      (await list()).map(({ name }) => name),
      ['detached'],
    )
    assert.equal(await theirs.release(), true)
    assert.equal(await using('detached', ({ isHeld }) => isHeld), true)
    assert.equal(await acquireAndExecute('detached', ({ isHeld }) => isHeld), true)
    assert.deepEqual([await acquireLock('detached'), await releaseLock('detached'), stats().held], [true, true, 1])
    const { connect } = LockService
    const { forceRelease, close } = await connect(place.target, place.options)
    assert.equal(await forceRelease('nothing'), false)
    await close()
    assert.deepEqual(Object.keys(a), [])
  })

  test('new throws a coded error', () => {
    for (const Class of /** @type {any[]} */ ([LockService, Lock])) {
      for (const args of [[], [{}], [1]]) {
        assert.throws(
          () => new Class(...args),
          (error) => isLockError(error, 'LOCK_INVALID_ARGUMENT') && /not from new/.test(error.message),
        )
      }
    }
  })

  test('isLockError accepts only errors of holdfast, also by code, and of another copy of the package', async (place) => {
    const a = await place.connect()
    const error = await rejection(a.acquire(''))
    assert.equal(error instanceof LockError, true)
    assert.equal(isLockError(error), true)
    assert.equal(isLockError(error, 'LOCK_INVALID_ARGUMENT'), true)
    assert.equal(isLockError(error, 'LOCK_TIMEOUT'), false)
    const { name, code, message, retryable } = error
    assert.equal(isLockError(Object.assign(new Error(message), { name, code, retryable })), true)
    const others = [
      undefined,
      null,
      'LockError',
      5,
      {},
      new Error('x'),
      Object.assign(new Error('x'), { code: 'LOCK_LOST' }),
    ]
    for (const other of others) assert.equal(isLockError(other), false)
    const own = new LockError('LOCK_LOST', 'gone', { key: 'n', cause: error })
    assert.deepEqual([own.code, own.key, own.retryable, own.cause], ['LOCK_LOST', 'n', false, error])
    assert.equal(isLockError(own, 'LOCK_LOST'), true)
  })

  test('every rejection has the async frames of its caller', async (place) => {
    const [a, b] = await place.connectAll(2)
    const lock = await a.acquire('busy')
    const json = lock.transferable()
    const lost = await a.acquire('lost')
    await b.forceRelease('lost')
    const closed = await place.connect()
    await closed.close()
    const never = () => {}
    const calls = {
      acquire: () => b.acquire('busy', { waitMs: 1 }),
      'acquire, invalid': () => b.acquire('', {}),
      'acquire, option': () => b.acquire('n', { ttlMs: 0 }),
      'acquire with a signal': () => b.acquire('busy', { waitMs: 1, signal: new AbortController().signal }),
      using: () => b.using('busy', { waitMs: 1 }, never),
      'using, lost': () => b.using('taken', async () => void (await a.forceRelease('taken'))),
      tryAcquire: () => closed.tryAcquire('n'),
      tryUsing: () => closed.tryUsing('n', never),
      'tryUsing, invalid': () => b.tryUsing('n', wrong(undefined)),
      oncePer: () => closed.oncePer('n', { periodMs: '1h' }, never),
      acquireLock: () => closed.acquireLock('n'),
      releaseLock: () => closed.releaseLock('n'),
      acquireAndExecute: () => closed.acquireAndExecute('n', never),
      'acquireAndExecute, invalid': () => b.acquireAndExecute('n', wrong(undefined)),
      'acquireAndExecute, options': () => closed.acquireAndExecute({ name: 'n', waitMs: 1 }, never),
      restore: () => b.restore({ ...json, token: '0'.repeat(32) }),
      inspect: () => closed.inspect('n'),
      list: () => closed.list(),
      'list, invalid': () => b.list(wrong({ prefix: 1 })),
      'list, iterated': async () => {
        for await (const info of closed.list()) assert.fail(info.name)
      },
      forceRelease: () => closed.forceRelease('n'),
      semaphore: () => b.semaphore('n', 0),
      'semaphore, acquire': () => closed.semaphore('n', 1).acquire(),
      'semaphore, option': () => b.semaphore('n', 1).acquire({ permits: 2 }),
      'semaphore, tryAcquire': () => closed.semaphore('n', 1).tryAcquire(),
      'semaphore, using': () => closed.semaphore('n', 1).using(never),
      'semaphore, inspect': () => closed.semaphore('n', 1).inspect(),
      'semaphore, forceRelease': () => closed.semaphore('n', 1).forceRelease(),
      readWriteLock: () => b.readWriteLock(wrong(1)),
      'readWriteLock, tryUsing': () => closed.readWriteLock('n').write.tryUsing(never),
      'readWriteLock, inspect': () => closed.readWriteLock('n').inspect(),
      ping: () => closed.ping(),
      close: () => b.close({ drainMs: -1 }),
      withPrefix: () => b.withPrefix(wrong(1)),
      elect: () => b.elect('n', wrong(undefined)),
      watch: () => b.watch(wrong(1)),
      'watch, next': () => b.watch('n'.repeat(600)).next(),
      extend: () => lost.extend(1000),
      connect: () => LockService.connect('gopher://host'),
    }
    // The native core rejects these before the call returns.
    const early = {
      acquire: () => b.acquire(''),
      tryAcquire: () => b.tryAcquire(''),
      using: () => b.using('', never),
      tryUsing: () => b.tryUsing('', never),
      oncePer: () => b.oncePer('', { periodMs: '1h' }, never),
      acquireLock: () => b.acquireLock(''),
      releaseLock: () => b.releaseLock(''),
      acquireAndExecute: () => b.acquireAndExecute('', never),
      inspect: () => b.inspect(''),
      forceRelease: () => b.forceRelease(''),
    }
    for (const [what, call] of Object.entries(early)) Object.assign(calls, { [`${what}, early`]: call })
    // `release` rejects after a failure of the store only, and these reject never.
    const others = ['release', 'stop', 'resign', 'stats', 'transferable', 'toJSON', 'constructor']
    for (const { prototype } of [LockService, Lock, Election]) {
      for (const [name, { value }] of Object.entries(Object.getOwnPropertyDescriptors(prototype))) {
        if (typeof value === 'function' && !others.includes(name)) assert.ok(name in calls, `${name} has no case`)
      }
    }
    const ignore = () => {}
    for (const channels of [[], [tracingChannel('holdfast:acquire'), tracingChannel('holdfast:using')]]) {
      const subscribers = { start: ignore, end: ignore, asyncStart: ignore, asyncEnd: ignore, error: ignore }
      for (const channel of channels) channel.subscribe(subscribers)
      for (const [what, call] of Object.entries(calls)) {
        const payOrder = async () => {
          await call()
        }
        const error = await rejection(payOrder())
        assert.equal(isLockError(error), true, what)
        assert.match(error.stack, /\n +at (async )?payOrder \(.*errors\.mjs:\d+:\d+\)/, what)
        assert.match(inspect(error), /payOrder/, what)
      }
      for (const channel of channels) channel.unsubscribe(subscribers)
    }
    await lock.release()
  })

  test('the error of a driver is the cause, without frames of holdfast', async () => {
    const error = await rejection(LockService.connect('redis://127.0.0.1:1', { storeTimeoutMs: 500 }))
    assert.equal(isLockError(error, 'LOCK_STORE'), true)
    assert.equal(error.cause instanceof Error, true)
    assert.equal(error.cause.stack, `Error: ${error.cause.message}`)
    assert.deepEqual(structuredClone(error).message, error.message)
  })

  test('an uncaught error shows the line of its caller', async () => {
    const code = `
      import { LockService } from '${INDEX}'
      const locks = await LockService.connect('memory:')
      await locks.acquire('busy')
      const payOrder = async () => {
        await locks.acquire('busy', { waitMs: 1 })
      }
      await payOrder()`
    const { code: status, stderr } = await runNode(code)
    assert.equal(status, 1)
    assert.match(stderr, /LockError \[LOCK_TIMEOUT\]: the lock "busy" was still busy after 1 ms/)
    assert.match(stderr, /at async payOrder \(/)
    assert.match(stderr, /code: 'LOCK_TIMEOUT'/)
  })
}
