import { positiveMs } from './durations.js'
import { answerOf, invalid } from './errors.js'
import { native } from './native.js'
import { fields, flag, nameOf } from './options.js'
import { connectionIn, LockService } from './service.js'
import type { ConnectOptions, Duration } from './types.js'

/** The options of `createTestLocks`, and of `connect` of its result. */
export type TestLocksOptions = Pick<ConnectOptions, 'defaults' | 'onEvent' | 'storeTimeoutMs'>

const OPTIONS = ['defaults', 'onEvent', 'storeTimeoutMs']

/** A lock service on an isolated store in memory, and what a test does to that store. The functions may be detached. */
export interface TestLocks extends AsyncDisposable {
  /** An ordinary lock service on the store. */
  readonly locks: LockService

  /**
   * Connects another lock service to the same store, as another process would.
   * @throws `LOCK_INVALID_ARGUMENT`
   */
  connect(options?: TestLocksOptions): Promise<LockService>

  /**
   * Ends the lease of a name, as if the store had lost it. Its holder loses the lock, with all names of the lock: `signal`
   * aborts with `LOCK_LOST`, `isHeld` is `false`, `using` rejects with `LOCK_LOST`. The next waiter gets the name.
   * @param options `shared`: the name is that of a semaphore or a read/write lock, which all holders lose
   * @throws `LOCK_INVALID_ARGUMENT` when the name is not held
   */
  lose(name: string, options?: { shared?: boolean | undefined }): Promise<void>

  /**
   * Moves the clock of the store and of its leases forward. A lease that is not renewed expires; its holder loses it, and
   * the next waiter gets the name. A lease that is renewed is renewed in that time, and stays held; `maxHoldMs` and `minHoldMs`
   * pass. The promise resolves after these effects.
   *
   * Other clocks do not move: `waitMs` of a call, `stallLimitMs`, and timers and dates of JavaScript. Real time goes on as well.
   * @param duration more than 0, at most 2147483648 (2^31) ms, or text with a unit
   * @throws `LOCK_INVALID_ARGUMENT`
   */
  advance(duration: Duration): Promise<void>

  /** Closes every service on the store. The store ends with them. May be called again. */
  close(): Promise<void>

  /** Closes every service on the store like `close()`. */
  [Symbol.asyncDispose](): Promise<void>
}

/**
 * Creates an isolated store in memory for one test, and a lock service on it.
 *
 * @example
 * const { locks, lose, close } = await createTestLocks()
 * const lock = await locks.acquire('report')
 * await lose('report')
 * assert.equal(lock.signal.aborted, true)
 * await close()
 *
 * @throws `LOCK_INVALID_ARGUMENT`
 */
export async function createTestLocks(options?: TestLocksOptions): Promise<TestLocks> {
  // Loaded here: an application that imports `holdfast` does not need it.
  const { randomUUID } = require('node:crypto') as typeof import('node:crypto')
  const url = `memory:${randomUUID()}`
  const services: LockService[] = []
  const natives = () => services.map((service) => connectionIn(service).native)

  async function connect(options?: TestLocksOptions): Promise<LockService> {
    fields('options', options, OPTIONS)
    const service = await LockService.connect(url, options)
    services.push(service)
    return service
  }

  async function lose(name: string, options?: { shared?: boolean | undefined }): Promise<void> {
    nameOf(name)
    const shared = fields('options', options, ['shared'])?.['shared'] ?? false
    if (!(await answerOf(native.lose(natives(), name, flag('shared', shared)))))
      throw invalid('name', 'must be held', `the free name ${JSON.stringify(name)}`)
  }

  async function advance(duration: Duration): Promise<void> {
    await answerOf(native.advance(natives(), positiveMs('duration', duration)))
  }

  async function close(): Promise<void> {
    await Promise.all(services.map((service) => service.close()))
  }

  return { locks: await connect(options), connect, lose, advance, close, [Symbol.asyncDispose]: close }
}
