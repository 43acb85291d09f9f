import { acquire, REJECT_BUSY } from './connection.js'
import type { Connection } from './connection.js'
import { errorOf, isLockError, warn } from './errors.js'
import { createLock, finishLock, holdAtLeast } from './lock.js'
import type { Lock } from './lock.js'
import { ACQUIRE, callback, EXECUTE, fields, isObject, nameOf, namesOf, ONCE, requestOf, UNLIMITED } from './options.js'
import type { Request, Side } from './options.js'
import { positiveMs, secondsOf } from './durations.js'
import { traceAcquire, traceUsing } from './telemetry.js'
import type { Run } from './telemetry.js'
import type { Attempt } from './types.js'

/**
 * Of instances that call `oncePer` at the same time, one is granted the name: on a quorum, single attempts may all fail. A wait beyond
 * the end of the period would run the job again, so it is at most half a period.
 */
const ONCE_WAIT_MS = 1000

type Job<T> = (lock: Lock) => T | PromiseLike<T>

/** @internal Records that a job runs. Until it has ended the process does not exit by itself: it may wait for its signal alone. */
export function begin({ native, jobs }: Connection): void {
  jobs.running += 1
  if (jobs.running === 1) native.setRunsJobs(true)
}

/** @internal Records that a job has ended. */
export function end({ native, jobs }: Connection): void {
  jobs.running -= 1
  if (jobs.running === 0) native.setRunsJobs(false)
}

/** Releases the lock of a job that has ended. Resolves to the JSON text of its loss, or to `null`. */
function finish(connection: Connection, lock: Lock): Promise<string | null> {
  const finished = finishLock(lock)
  end(connection)
  return finished
}

/** @internal What a call does with a busy name: `using` rejects, `tryUsing` and `oncePer` return its holder. */
export type Kind = 'using' | 'tryUsing' | 'oncePer'

/** @internal `using`, `tryUsing` and `oncePer`; with `side` those of a semaphore, or of one side of a read/write lock. */
export function using<T>(
  connection: Connection,
  kind: Kind,
  names: unknown,
  second: unknown,
  third: unknown,
  side?: Side,
): Promise<T | Attempt<T>> {
  const acquireAndRun = async (run: Run): Promise<T | Attempt<T>> => {
    const isOnce = kind === 'oncePer'
    const wanted = isOnce ? nameOf(names) : namesOf(names)
    const isShort = typeof second === 'function' && third === undefined
    const options = isShort ? undefined : fields('options', second, isOnce ? ONCE : (side?.known ?? ACQUIRE))
    const job = callback<Job<T>>('fn', isShort ? second : third)
    const periodMs = isOnce ? positiveMs('periodMs', options?.['periodMs']) : 0
    const mayRun = kind === 'using' && side?.kind === 'semaphore'
    const request = requestOf(options, connection.renews, side, mayRun)
    if (isOnce) request.more = { ...UNLIMITED, ...request.more }
    if (kind !== 'using' && Number.isNaN(request.waitMs)) request.waitMs = Math.min(ONCE_WAIT_MS, periodMs / 2)
    let lock: Lock
    try {
      const call = () => acquire(connection, wanted, request, REJECT_BUSY)
      lock = (await traceAcquire(connection, kind, wanted, call, side?.kind))!
    } catch (thrown) {
      // The reason of the caller's signal may be an error of another call.
      if (thrown === request.signal?.reason) throw thrown
      if (request.runsAnyway && isLockError(thrown, 'LOCK_STORE')) lock = withoutPermit(connection, wanted, thrown)
      else if (kind === 'using' || !isLockError(thrown, 'LOCK_TIMEOUT')) throw thrown
      else return { ran: false, holder: thrown.holder }
    }
    begin(connection)
    let value: T
    try {
      value = await run(() => job(lock))
    } catch (cause) {
      const loss = await finish(connection, lock)
      if (loss === null) throw cause
      throw errorOf(loss, connection.prefix, { cause })
    }
    // Not before: after an error, another process may run the job at once.
    if (isOnce) holdAtLeast(lock, periodMs)
    const loss = await finish(connection, lock)
    if (loss !== null) throw errorOf(loss, connection.prefix)
    return kind === 'using' ? value : { ran: true, value }
  }
  return traceUsing(connection, kind, () => names, acquireAndRun, side?.kind)
}

/** Returns the lock of a job that runs without a permit, and warns once per outage. */
function withoutPermit({ prefix, outage }: Connection, name: string | string[], { message }: Error): Lock {
  if (!outage.isWarned) {
    const until = "until the store answers, calls with onStoreError: 'run' may exceed their limits"
    warn(
      'HOLDFAST_NO_PERMIT',
      `a job of the semaphore ${JSON.stringify(name)} runs without a permit (${until}): ${message}`,
    )
  }
  outage.isWarned = true
  return createLock(0, name, prefix, { permits: 0, limit: 0 })
}

/**
 * @internal `acquireAndExecute`. Not async: V8 adds the frames of the caller to an error only through promises that are awaited.
 */
export function acquireAndExecute<T>(
  connection: Connection,
  first: unknown,
  second: unknown,
  third: unknown,
): Promise<T | undefined> {
  const acquireAndRun = async (run: Run): Promise<T | undefined> => {
    let name: string
    let request: Request
    let fn: unknown
    if (isObject(first)) {
      const options = fields('options', first, EXECUTE)!
      name = nameOf(options['name'])
      request = requestOf(options, false)
      fn = second
    } else {
      name = nameOf(first)
      request = requestOf(undefined, false)
      const isShort = third === undefined && typeof second === 'function'
      if (!isShort && second !== undefined) request.ttlMs = secondsOf(second)
      fn = isShort ? second : third
    }
    const job = callback<Job<T>>('fn', fn)
    request.renew ??= false
    if (Number.isNaN(request.waitMs)) request.waitMs = 0
    const lock = await traceAcquire(connection, 'acquireAndExecute', name, () => acquire(connection, name, request, 0))
    if (lock === null) return undefined
    begin(connection)
    try {
      return await run(() => job(lock))
    } finally {
      await finish(connection, lock)
    }
  }
  const nameOfCall = () => (isObject(first) ? first['name'] : first)
  return traceUsing(connection, 'acquireAndExecute', nameOfCall, acquireAndRun)
}
