// The error model: a real Error, told apart by its code.
import assert from 'node:assert/strict'
import { inspect } from 'node:util'
import { assertLockError, rejects, runNode, timed } from '../tools.mjs'

export function errors(test) {
  test('an error has the shape that the types say', async (place) => {
    const [a, b] = await place.connectAll(2)
    const lock = await a.acquire('busy')
    const error = await rejects(b.acquire('busy', { waitMs: 5 }), 'LOCK_TIMEOUT', { key: 'busy', retryable: true })
    assert.equal(Object.getPrototypeOf(error), Error.prototype)
    assert.equal(Object.prototype.toString.call(error), '[object Error]')
    assert.equal(String(error), `LockError: ${error.message}`)
    assert.deepEqual(Object.keys(error), ['code', 'retryable', 'key'])
    assert.match(error.stack, /^LockError \[LOCK_TIMEOUT\]: .*busy/)
    assert.match(inspect(error), /LOCK_TIMEOUT/)
    assert.equal('cause' in error, false)
    assert.equal('engine' in error, false)
    assert.equal(error.message, 'the lock "busy" was still busy after 5 ms')
    await lock.release()
  })

  test('each code, its key, and whether to try again', async (place) => {
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

  test('acquire waits 10 s unless told otherwise', async (place) => {
    const [a, b] = await place.connectAll(2)
    const lock = await a.acquire('patience')
    const call = rejects(b.acquire('patience'), 'LOCK_TIMEOUT')
    const other = rejects(b.using('patience', {}, () => assert.fail('fn was called')), 'LOCK_TIMEOUT')
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

  test('a rejected promise that nobody looks at is an ordinary unhandled rejection', async () => {
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

  test('nothing that is handled shows up as an unhandled rejection, and nothing is printed', async () => {
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
      locks.acquireLock('gist', 0.01)
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
        () => { const { acquire } = locks; return acquire('y') }, () => { const { release } = lock; return release() },
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
}
