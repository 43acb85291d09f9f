// Run by Jest and Vitest, whose tests have globals of their own: what holdfast returns and throws must be of them.
module.exports = async function realm({ LockService, LockError, isLockError }, name) {
  const seen = []
  const check = (what, isTrue) => isTrue || seen.push(what)
  const promises = (calls) => {
    for (const [what, promise] of Object.entries(calls)) check(`promise of ${what}`, promise instanceof Promise)
    return Promise.all(Object.values(calls))
  }
  const failure = async (what, promise, code) => {
    check(`promise of ${what}`, promise instanceof Promise)
    const error = await promise.then(
      () => undefined,
      (thrown) => thrown,
    )
    check(`${what} is an Error`, error instanceof Error)
    check(`${what} is a LockError`, error instanceof LockError && isLockError(error, code))
  }

  const connecting = LockService.connect(`memory:${name}`)
  check('promise of connect', connecting instanceof Promise)
  const locks = await connecting
  const lock = await locks.acquire('busy', { ttlMs: 60_000 })
  check('names', lock.names instanceof Array)
  check('signal', lock.signal instanceof AbortSignal)
  await failure('timeout', locks.acquire('busy', { waitMs: 1 }), 'LOCK_TIMEOUT')
  await failure('invalid argument', locks.acquire(''), 'LOCK_INVALID_ARGUMENT')
  await failure('no store', LockService.connect('gopher://host'), 'LOCK_INVALID_ARGUMENT')
  const [, , info, , list] = await promises({
    tryAcquire: locks.tryAcquire('busy'),
    acquireLock: locks.acquireLock('gist'),
    inspect: locks.inspect('busy'),
    using: locks.using('used', () => 1),
    list: locks.list(),
    acquireAndExecute: locks.acquireAndExecute('job', () => 1),
    releaseLock: locks.releaseLock('gist'),
    extend: lock.extend(60_000),
    forceRelease: locks.forceRelease('nothing'),
  })
  check('since', info.holder.since instanceof Date)
  check('list', list instanceof Array)
  const thrown = new TypeError('mine')
  check('the same error', (await locks.using('u', () => Promise.reject(thrown)).catch((error) => error)) === thrown)
  await promises({ release: lock.release(), close: locks.close() })
  await failure('closed', locks.acquire('n'), 'LOCK_CLOSED')
  return seen
}
