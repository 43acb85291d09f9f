import { ACQUIRE, callback, connectionOf, EXECUTE, fields, nameOf, namesOf, requestOf, restorationOf, secondsOf, text } from './options.js'
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
// The flags of the native `acquire`.
const [RENEW, NO_RENEW, REJECT_BUSY] = [1, 2, 4]

/** What the native core sends: an event, or the loss of a lease. */
interface Message {
  lost?: number
  error?: Record<string, any>
  type: string
  names: string[]
  [part: string]: unknown
}

/** The function that gets the messages of one service. It keeps no reference to the service. */
function receiver(onEvent: ((event: LockEvent) => unknown) | undefined): (batch: string) => void {
  return (batch) => {
    for (const message of JSON.parse(batch) as Message[]) {
      if (message.lost !== undefined) reportLoss(message.lost, message.error!)
      else if (onEvent) deliver(onEvent, message)
    }
  }
}

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

/** The metadata of a lock. Another tool may have written something else than JSON. */
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
   * Connects, and talks to the store once before it resolves.
   *
   * | target | store |
   * |---|---|
   * | none | `HOLDFAST_URL` from the environment if set, else a SQLite file of this machine alone, in the user's state folder: for development |
   * | `memory:` or `memory:NAME` | this process only, for unit tests |
   * | `sqlite:PATH` | every process on this machine |
   * | `redis://`, `rediss://` | Redis 6.2 or later, one node |
   * | `redis+sentinel://h1,h2,h3/MASTER`, `rediss+sentinel://…` | the Redis master of that name, by the word of its sentinels |
   * | `redis+cluster://h1,h2,h3`, `rediss+cluster://…` | Redis Cluster 7.0 or later |
   * | a list of three or more `redis://` or `rediss://` | a quorum of independent Redis nodes: held while a majority holds it |
   * | `mongodb://`, `mongodb+srv://` | MongoDB 4.4 or later: standalone or replica set |
   *
   * @throws `LOCK_STORE` when the store cannot be reached within `storeTimeoutMs`, `LOCK_INVALID_ARGUMENT`
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
   * The gist's: one try, held until released or expired, not renewed. A name that this service holds is busy for itself
   * too.
   * @param ttlSeconds in **seconds**, fractions allowed @default 30
   * @returns `true`: held by this service. `false`: it is busy, or the lease ended before a blocked event loop received it
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
   * The gist's `releaseLock`: releases what `acquireLock` of this service acquired, and never another holder's lock.
   * @returns `true`: this call freed it. `false`: this service held nothing (never acquired, expired, taken over)
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
   * The gist's: one try; calls `fn` under the lock, releases, and passes on what `fn` returned or threw. Not renewed
   * unless asked for: the ttl is the longest that the job blocks the next one.
   * @returns `undefined`, without calling `fn`, when the name is busy
   * @throws what `fn` throws, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
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
    const lock = await this.#take(name, request, 0)
    if (lock === null) return undefined
    try {
      return await run(lock)
    } finally {
      await finishLock(lock)
    }
  }

  /**
   * Takes a lock, or several names all or nothing, and waits for it.
   * @throws `LOCK_TIMEOUT` when it is still busy after `waitMs`, `signal.reason` when aborted, `LOCK_STORE`,
   * `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  async acquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock> {
    const wanted = namesOf(names)
    return (await this.#take(wanted, requestOf(fields('options', options, ACQUIRE)), REJECT_BUSY))!
  }

  /**
   * One try.
   * @returns `null` when a name is busy
   * @throws `signal.reason` when aborted, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  async tryAcquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock | null> {
    const wanted = namesOf(names)
    const request = requestOf(fields('options', options, ACQUIRE))
    request.waitMs = 0
    return await this.#take(wanted, request, 0)
  }

  /**
   * Acquires, renews, runs `fn`, releases.
   * @throws `LOCK_LOST` once `fn` has settled when the lease was lost under it (`cause`: what `fn` threw, if it did),
   * else what `fn` throws; `LOCK_TIMEOUT`, `signal.reason`, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
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
    const lock = (await this.#take(wanted, requestOf(options), REJECT_BUSY))!
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
   * Takes over a lock that was acquired elsewhere, from its `toJSON()` (or the text of it), and gives it a fresh token.
   * Whoever had it before can neither extend nor free it from then on, and learns of the loss at its next renewal, or at
   * its next use: hand a lock over only when you are done with it.
   * @throws `LOCK_LOST` when the lease is gone (taken over before, too), `LOCK_STORE`, `LOCK_CLOSED`,
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

  /** Who holds a name; `null` when it is free. */
  async inspect(name: string): Promise<LockInfo | null> {
    nameOf(name)
    try {
      return infosOf(await this.#native.inspect(name))[0] ?? null
    } catch (thrown) {
      throw fromNative(thrown)
    }
  }

  /** Everything held whose name starts with `prefix` (literal text, no pattern), sorted by name in byte order. */
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

  /** This service's counters. */
  stats(): LockStats {
    return JSON.parse(this.#native.stats())
  }

  /**
   * Releases what is held, ends the waits with `LOCK_CLOSED`, gives back connections. Later calls reject with
   * `LOCK_CLOSED`. May be called again. Whoever still works under a lock did not let go of it: its `signal` aborts with
   * `LOCK_LOST`, and `using` rejects with it.
   */
  async close(): Promise<void> {
    await this.#native.close()
  }

  /** As `close()`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.#native.close()
  }

  /** @internal What `console.log` shows. */
  [inspect](): object {
    const { held, waiting } = this.stats()
    return { engine: this.#native.engine, held, waiting }
  }

  /** Acquires. `null`: busy. */
  async #take(names: string | string[], request: Request, flags: number): Promise<Lock | null> {
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
