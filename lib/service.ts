import {
  ACQUIRE,
  callback,
  connectionOf,
  EXECUTE,
  fields,
  nameOf,
  namesOf,
  requestOf,
  restorationOf,
  secondsOf,
  text,
} from './options.js'
import type { Request } from './options.js'
import { describe, errorOf, fromNative, LockError, warn } from './errors.js'
import { createLock, finishLock } from './lock.js'
import type { Lock } from './lock.js'
import { native } from './native.js'
import type { NativeService } from './native.js'
import { listen, reportLoss, unlisten } from './signals.js'
import type {
  AcquireOptions,
  ConnectOptions,
  ExecuteOptions,
  Json,
  LockEvent,
  LockInfo,
  LockJson,
  LockStats,
  Target,
} from './types.js'

type Run<T> = (lock: Lock) => T | PromiseLike<T>

const inspect = Symbol.for('nodejs.util.inspect.custom')
// The flags of the native `acquire` (`src/js/service.rs`).
const [RENEW, NO_RENEW, REJECT_BUSY] = [1, 2, 4]

/** A message of the native core: an event, or the loss of a lease. */
interface Message {
  lost?: number
  error?: Record<string, any>
  type: string
  names: string[]
  [part: string]: unknown
}

/** Creates the function that receives the messages of one service. It has no reference to the service. */
function receiver(onEvent: ((event: LockEvent) => unknown) | undefined): (batch: string) => void {
  return (batch) => {
    for (const message of JSON.parse(batch) as Message[]) {
      if (message.lost !== undefined) reportLoss(message.lost, message.error!)
      else if (onEvent) deliver(onEvent, message)
    }
  }
}

/** Calls `onEvent`. What it throws or rejects with becomes a warning. */
function deliver(onEvent: (event: LockEvent) => unknown, { type, names, fencingToken, ...parts }: Message): void {
  const event: Record<string, unknown> = { type, name: names[0], names }
  if (typeof fencingToken === 'string') event['fencingToken'] = BigInt(fencingToken)
  for (const [part, value] of Object.entries(parts)) if (value !== null) event[part] = value
  try {
    const returned: any = onEvent(event as unknown as LockEvent)
    if (typeof returned === 'object' && typeof returned?.then === 'function') Promise.resolve(returned).catch(warnOf)
  } catch (thrown) {
    warnOf(thrown)
  }
}

function warnOf(thrown: any): void {
  const stack = typeof thrown === 'object' ? thrown?.stack : undefined
  warn(`onEvent failed: ${typeof stack === 'string' ? stack : describe(thrown)}`)
}

function infosOf(json: string): LockInfo[] {
  return JSON.parse(json).map(({ remainingMs, fencingToken, holder, metadata, ...info }: any) => ({
    ...info,
    remainingMs: remainingMs ?? Infinity,
    fencingToken: fencingToken === null ? null : BigInt(fencingToken),
    holder: holder && { ...holder, since: new Date(holder.since) },
    metadata: metadataOf(metadata),
  }))
}

/** Parses the metadata of a lock. Text of another tool that is not JSON is ignored. */
function metadataOf(json: string | null): Json {
  try {
    return json === null ? null : JSON.parse(json)
  } catch {
    return null
  }
}

/**
 * A lock service over one store. Create one per process with `LockService.connect`. Its methods may be detached:
 * `const { acquire } = locks`.
 */
export class LockService implements AsyncDisposable {
  readonly #native: NativeService

  /**
   * Connects to a store, and contacts it once before the promise resolves. Rejects after `storeTimeoutMs` (5 s by default).
   *
   * | target | store |
   * |---|---|
   * | none | `HOLDFAST_URL` in the environment if set, otherwise a SQLite file of this machine in the user's state folder: for development |
   * | `memory:` or `memory:NAME` | this process only, for unit tests |
   * | `sqlite:PATH` | every process on this machine |
   * | `redis://`, `rediss://` | Redis 6.2 or later, one node |
   * | `redis+sentinel://h1,h2,h3/MASTER`, `rediss+sentinel://…` | the Redis master of that name, which its sentinels report |
   * | `redis+cluster://h1,h2,h3`, `rediss+cluster://…` | Redis Cluster 7.0 or later |
   * | a list of three or more `redis://` or `rediss://` | a quorum of independent Redis nodes: a lock is held if a majority of them has it |
   * | `mongodb://`, `mongodb+srv://` | MongoDB 4.4 or later: standalone or replica set |
   *
   * @throws `LOCK_STORE` when the store cannot be reached within `storeTimeoutMs` or rejects the connection,
   * `LOCK_INVALID_ARGUMENT`
   */
  static connect(target?: Target | readonly Target[], options?: ConnectOptions): Promise<LockService>
  static connect(options: ConnectOptions & { url?: Target | readonly Target[] | undefined }): Promise<LockService>
  static async connect(target?: unknown, options?: unknown): Promise<LockService> {
    const { config, onEvent } = connectionOf(target, options)
    try {
      return new LockService(await native.connect(config, receiver(onEvent)))
    } catch (thrown) {
      throw fromNative(thrown)
    }
  }

  private constructor(service?: NativeService) {
    if (!(service instanceof native.LockService)) {
      const origin = 'a LockService comes from `await LockService.connect(…)`, not from new'
      throw new LockError('LOCK_INVALID_ARGUMENT', origin)
    }
    this.#native = service
    for (const [name, { value }] of Object.entries(Object.getOwnPropertyDescriptors(LockService.prototype))) {
      if (name === 'constructor') continue
      Object.defineProperty(this, name, { value: value.bind(this), configurable: true, writable: true })
    }
  }

  /**
   * The gist's `acquireLock`: makes one attempt. The lease is not renewed: it ends with its release or after the ttl. A name that
   * this service holds is busy for this service as well.
   * @param ttlSeconds in **seconds**, fractions allowed: more than 0, at most 2147483.648. Default: 30, or `defaults.ttlMs`
   * @returns `true`: this service holds the lock. `false`: the name is busy, or the lease ended before a blocked event loop
   * received it
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  async acquireLock(name: string, ttlSeconds?: number): Promise<boolean> {
    nameOf(name)
    const ttlMs = ttlSeconds === undefined ? NaN : secondsOf(ttlSeconds)
    try {
      return await this.#native.acquireByName(name, ttlMs)
    } catch (thrown) {
      throw fromNative(thrown)
    }
  }

  /**
   * The gist's `releaseLock`: releases a lock that `acquireLock` of this service acquired, and never another holder's lock.
   * @returns `true`: this call released it. `false`: this service did not hold it (not acquired, expired, or transferred)
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  async releaseLock(name: string): Promise<boolean> {
    nameOf(name)
    try {
      return await this.#native.releaseByName(name)
    } catch (thrown) {
      throw fromNative(thrown)
    }
  }

  /**
   * The gist's `acquireAndExecute`: makes one attempt, calls `fn` while it holds the lock, and releases the lock. The lease is
   * renewed only with `renew: true`; without it the lock expires after the ttl, also while `fn` runs.
   * @returns the result of `fn`; `undefined`, without a call of `fn`, if the name is busy
   * @throws the error of `fn`, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`; with `signal`: `signal.reason`
   */
  acquireAndExecute<T>(options: ExecuteOptions, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>
  acquireAndExecute<T>(
    name: string,
    ttlSeconds: number | undefined,
    fn: (lock: Lock) => T | PromiseLike<T>,
  ): Promise<T | undefined>
  acquireAndExecute<T>(name: string, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>
  async acquireAndExecute<T>(first: unknown, second?: unknown, third?: unknown): Promise<T | undefined> {
    let name: string
    let request: Request
    let fn: unknown
    if (typeof first === 'object' && first !== null && !Array.isArray(first)) {
      const options = fields('options', first, EXECUTE)!
      name = nameOf(options['name'])
      request = requestOf(options)
      fn = second
    } else {
      name = nameOf(first)
      request = requestOf(undefined)
      const isShort = third === undefined && typeof second === 'function'
      if (!isShort && second !== undefined) request.ttlMs = secondsOf(second)
      fn = isShort ? second : third
    }
    const run = callback<Run<T>>('fn', fn)
    request.renew ??= false
    if (Number.isNaN(request.waitMs)) request.waitMs = 0
    const lock = await this.#acquire(name, request, 0)
    if (lock === null) return undefined
    try {
      return await run(lock)
    } finally {
      await finishLock(lock)
    }
  }

  /**
   * Acquires a lock on one name, or on all of up to 1000 names at the same time, and waits while a name is busy.
   * @throws `LOCK_TIMEOUT` when a name is still busy after `waitMs`, `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`,
   * `LOCK_INVALID_ARGUMENT`
   */
  async acquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock> {
    const wanted = namesOf(names)
    return (await this.#acquire(wanted, requestOf(fields('options', options, ACQUIRE)), REJECT_BUSY))!
  }

  /**
   * Acquires a lock like `acquire`, but makes one attempt and does not wait.
   * @returns the lock; `null` if a name is busy
   * @throws `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  async tryAcquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock | null> {
    const wanted = namesOf(names)
    const request = requestOf(fields('options', options, ACQUIRE))
    request.waitMs = 0
    return await this.#acquire(wanted, request, 0)
  }

  /**
   * Acquires a lock like `acquire`, calls `fn` while it holds the lock, and releases the lock.
   * @returns the result of `fn`
   * @throws `LOCK_LOST` after the end of `fn` when the lease was lost while `fn` ran (`cause`: the error of `fn`, if it threw);
   * otherwise the error of `fn`; `LOCK_TIMEOUT`, `signal.reason`, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  using<T>(
    names: string | readonly string[],
    options: AcquireOptions | undefined,
    fn: (lock: Lock) => T | PromiseLike<T>,
  ): Promise<T>
  using<T>(names: string | readonly string[], fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>
  async using<T>(names: unknown, second: unknown, third?: unknown): Promise<T> {
    const wanted = namesOf(names)
    const isShort = typeof second === 'function' && third === undefined
    const options = isShort ? undefined : fields('options', second, ACQUIRE)
    const fn = callback<Run<T>>('fn', isShort ? second : third)
    const lock = (await this.#acquire(wanted, requestOf(options), REJECT_BUSY))!
    let value: T
    try {
      value = await fn(lock)
    } catch (cause) {
      const loss = await finishLock(lock)
      if (loss === null) throw cause
      throw errorOf(loss, { cause })
    }
    const loss = await finishLock(lock)
    if (loss !== null) throw errorOf(loss)
    return value
  }

  /**
   * Transfers a lock of another process or service to this service, from its `toJSON()` or the JSON text of that. The lock gets a
   * new owner token. From then on the former holder can neither extend nor release it. It finds its lock lost at its next
   * renewal or call, so transfer a lock only after its former holder has finished its work.
   * @throws `LOCK_LOST` when the lease has ended or was already transferred, `LOCK_STORE`, `LOCK_CLOSED`,
   * `LOCK_INVALID_ARGUMENT`
   */
  async restore(json: LockJson | string): Promise<Lock> {
    const { names, token, fencingToken, options } = restorationOf(json)
    try {
      return createLock(await this.#native.transfer(names, token, fencingToken, options), names)
    } catch (thrown) {
      throw fromNative(thrown)
    }
  }

  /**
   * Reads the holder of a name.
   * @returns the state of the lock; `null` if the name is free
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  async inspect(name: string): Promise<LockInfo | null> {
    nameOf(name)
    try {
      return infosOf(await this.#native.inspect(name))[0] ?? null
    } catch (thrown) {
      throw fromNative(thrown)
    }
  }

  /**
   * Lists the held locks whose name starts with `prefix`: literal text, not a pattern. Each page has `storeTimeoutMs`.
   * @returns the locks, sorted by the bytes of their names
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  async list(options?: { prefix?: string | undefined }): Promise<LockInfo[]> {
    const prefix = fields('options', options, ['prefix'])?.['prefix']
    const literal = prefix === undefined ? '' : text('prefix', prefix)
    try {
      return infosOf(await this.#native.list(literal))
    } catch (thrown) {
      throw fromNative(thrown)
    }
  }

  /**
   * Releases a name, no matter which owner holds it. The holder loses the lock at its next renewal.
   * @returns `true`: the name was held and is free now. `false`: it was free
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  async forceRelease(name: string): Promise<boolean> {
    nameOf(name)
    try {
      return await this.#native.forceRelease(name)
    } catch (thrown) {
      throw fromNative(thrown)
    }
  }

  /** Returns the counters of this service. */
  stats(): LockStats {
    return JSON.parse(this.#native.stats())
  }

  /**
   * Releases the held locks, ends waits with `LOCK_CLOSED`, and closes the connections. A lock that was held is lost to its
   * holder: its `signal` aborts with `LOCK_LOST`, and `using` rejects with it. Later calls reject with `LOCK_CLOSED`. Takes at
   * most `storeTimeoutMs`, or up to 1 s longer when the store does not answer. May be called again.
   */
  async close(): Promise<void> {
    await this.#native.close()
  }

  /** Closes the service like `close()`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.#native.close()
  }

  /** @internal Returns what `console.log` shows. */
  [inspect](): object {
    const { held, waiting } = this.stats()
    return { engine: this.#native.engine, held, waiting }
  }

  /** Starts the native call of every acquisition. Resolves to `null` if a name is busy. */
  async #acquire(names: string | string[], request: Request, flags: number): Promise<Lock | null> {
    const { ttlMs, waitMs, renew, signal } = request
    let { more } = request
    const call = signal && listen(signal)
    if (call) more = { ...more, ticket: call.ticket }
    if (renew !== undefined) flags |= renew ? RENEW : NO_RENEW
    let id: number
    try {
      id = await this.#native.acquire(names, ttlMs, waitMs, flags, more)
    } catch (thrown) {
      throw call?.aborted ? signal!.reason : fromNative(thrown)
    } finally {
      if (call) unlisten(signal!, call)
    }
    if (!call?.aborted) return id === 0 ? null : createLock(id, names)
    // The grant arrived after the abort.
    if (id !== 0) await createLock(id, names)[Symbol.asyncDispose]()
    throw signal!.reason
  }
}
