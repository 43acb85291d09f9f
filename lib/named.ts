import { acquire, fullName, REJECT_BUSY } from './connection.js'
import type { Connection } from './connection.js'
import { answerOf } from './errors.js'
import { sharedInfoOf } from './json.js'
import { registerLock } from './lock.js'
import type { Lock } from './lock.js'
import { ACQUIRE, fields, limitOf, MAX_PERMITS, nameOf, PERMIT, requestOf } from './options.js'
import type { Side } from './options.js'
import { using } from './run.js'
import { traceAcquire } from './telemetry.js'
import type { AcquireOptions, Attempt, LockInfo } from './types.js'

/** The options of the calls of a semaphore: those of `acquire`, and the number of permits. `minHoldMs` keeps the permits in use. */
export interface PermitOptions extends AcquireOptions {
  /**
   * The number of permits, which are acquired and released together: a whole number from 1 to the limit of the semaphore.
   * @default 1
   */
  permits?: number | undefined
}

/** The options of `using` of a semaphore: those of its other calls, and a job without a permit during an outage. */
export interface PermitUsingOptions extends Omit<PermitOptions, 'onStoreError'> {
  /**
   * As in `AcquireOptions`, and `'run'`: where `'fail'` rejects with `LOCK_STORE` while it acquires, this calls `fn` without a permit, **so
   * the limit may be exceeded**. The lock of that call has `isHeld` `false`, `permits` 0 and `fencingToken` 0n, and its `signal` does not abort.
   * The first such job of an outage emits a `HoldfastWarning` (`HOLDFAST_NO_PERMIT`). A busy semaphore still rejects with
   * `LOCK_TIMEOUT`, and a permit that is lost while `fn` runs with `LOCK_LOST`. Not in `defaults`.
   * @default 'fail'
   */
  onStoreError?: 'fail' | 'wait' | 'run' | undefined
}

/** A holder of a semaphore or a read/write lock: what `LockInfo` has but `waiting`, and its share. */
export interface PermitInfo extends Omit<LockInfo, 'waiting'> {
  /** The permits that it has in use: of a reader 1, of a writer 1048576. */
  readonly permits: number
  /** The limit of the call that acquired it; of a reader and a writer 1048576. */
  readonly limit: number
}

/** The state of a semaphore or a read/write lock. */
export interface SharedInfo {
  readonly name: string
  /** The permits in use. */
  readonly used: number
  /** The smallest limit of the holders; `null` without holders. Of a read/write lock: 1048576. */
  readonly limit: number | null
  /** The number of calls in the queue of the name, of all processes; 0 without holders, and while the slot of a Redis Cluster moves. */
  readonly waiting: number
  /** The holders, in the order of their grants. */
  readonly holders: readonly PermitInfo[]
}

/** The calls of a `LockService` on one fixed name: those of a semaphore, or of one side of a read/write lock. They may be detached. */
export interface NamedLock<O = AcquireOptions, U = O> {
  readonly name: string
  /**
   * Acquires like `LockService.acquire`, and waits in the queue of the name: strictly first come, first served.
   * @throws as `LockService.acquire`; `LOCK_INVALID_ARGUMENT` on a Redis quorum, and on a standalone or sharded MongoDB
   */
  acquire(options?: O): Promise<Lock>
  /**
   * Acquires like `LockService.tryAcquire`: one attempt, which never overtakes a call that waits. Resolves to `null` if it is not granted.
   * @throws as `acquire`, without `LOCK_TIMEOUT`
   */
  tryAcquire(options?: O): Promise<Lock | null>
  /**
   * Acquires like `acquire`, calls `fn`, and releases, like `LockService.using`.
   * @throws as `LockService.using`
   */
  using<T>(options: U | undefined, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>
  using<T>(fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>
  /**
   * Calls `fn` like `LockService.tryUsing`. `holder` is the holder whose lease ends first.
   * @throws as `using`, without `LOCK_TIMEOUT`
   */
  tryUsing<T>(options: O | undefined, fn: (lock: Lock) => T | PromiseLike<T>): Promise<Attempt<T>>
  tryUsing<T>(fn: (lock: Lock) => T | PromiseLike<T>): Promise<Attempt<T>>
}

/**
 * A limit on concurrency over all processes: at most `limit` permits are in use. It has no state: create one for each call, or keep one.
 * `LockService.semaphore` returns it.
 */
export interface Semaphore extends NamedLock<PermitOptions, PermitUsingOptions> {
  readonly limit: number
  /**
   * Reads the holders of permits.
   * @throws `LOCK_STORE`, `LOCK_CLOSED`; `LOCK_INVALID_ARGUMENT` where the store has no semaphores
   */
  inspect(): Promise<SharedInfo>
  /**
   * Releases the permits of all holders. They lose them at their next renewal. Resolves to whether there were any.
   * @throws `LOCK_STORE`, `LOCK_CLOSED`; `LOCK_INVALID_ARGUMENT` where the store has no semaphores
   */
  forceRelease(): Promise<boolean>
}

/** A read/write lock: many readers, or one writer. It has no state. `LockService.readWriteLock` returns it. */
export interface ReadWriteLock {
  readonly name: string
  /** The read side: readers hold it at the same time. A reader that comes after a waiting writer waits behind it. */
  readonly read: NamedLock
  /** The write side: its holder is the only one. A reader cannot become a writer: release, acquire, and check the state again. */
  readonly write: NamedLock
  /**
   * Reads the holders: readers, or one writer.
   * @throws `LOCK_STORE`, `LOCK_CLOSED`; `LOCK_INVALID_ARGUMENT` where the store has no semaphores
   */
  inspect(): Promise<SharedInfo>
  /**
   * Releases the name of all holders. They lose it at their next renewal. Resolves to whether there were any.
   * @throws `LOCK_STORE`, `LOCK_CLOSED`; `LOCK_INVALID_ARGUMENT` where the store has no semaphores
   */
  forceRelease(): Promise<boolean>
}

const READ: Side = { kind: 'read', known: ACQUIRE, permits: 1, limit: MAX_PERMITS }
const WRITE: Side = { kind: 'write', known: ACQUIRE, permits: MAX_PERMITS, limit: MAX_PERMITS }

function callsOf<O, U = O>(connection: Connection, name: string, side: Side): NamedLock<O, U> {
  const { kind, known } = side
  const requestFor = (options: unknown) => requestOf(fields('options', options, known), connection.renews, side)
  return {
    name,
    async acquire(options) {
      const request = requestFor(options)
      const call = () => acquire(connection, name, request, REJECT_BUSY)
      return registerLock((await traceAcquire(connection, 'acquire', name, call, kind))!)
    },
    async tryAcquire(options) {
      const request = requestFor(options)
      request.waitMs = 0
      const lock = await traceAcquire(connection, 'tryAcquire', name, () => acquire(connection, name, request, 0), kind)
      return lock && registerLock(lock)
    },
    using: (second: unknown, third?: unknown) => using(connection, 'using', name, second, third, side) as Promise<any>,
    tryUsing: (second: unknown, third?: unknown) =>
      using(connection, 'tryUsing', name, second, third, side) as Promise<any>,
  }
}

/** Returns the calls on all holders of a shared name. */
function callsOnAll(connection: Connection, name: string): Pick<Semaphore, 'inspect' | 'forceRelease'> {
  const { native, prefix } = connection
  return {
    async inspect() {
      return sharedInfoOf(await answerOf(native.inspectShared(fullName(connection, name)), prefix), name, prefix)
    },
    async forceRelease() {
      return await answerOf(native.forceReleaseShared(fullName(connection, name)), prefix)
    },
  }
}

/** @internal `LockService.semaphore`. */
export function createSemaphore(connection: Connection, name: unknown, limit: unknown): Semaphore {
  const own = nameOf(name)
  const side: Side = { kind: 'semaphore', known: PERMIT, permits: 1, limit: limitOf(limit) }
  return {
    ...callsOf<PermitOptions, PermitUsingOptions>(connection, own, side),
    limit: side.limit,
    ...callsOnAll(connection, own),
  }
}

/** @internal `LockService.readWriteLock`. */
export function createReadWriteLock(connection: Connection, name: unknown): ReadWriteLock {
  const own = nameOf(name)
  const [read, write] = [READ, WRITE].map((side) => callsOf(connection, own, side)) as [NamedLock, NamedLock]
  return { name: own, read, write, ...callsOnAll(connection, own) }
}
