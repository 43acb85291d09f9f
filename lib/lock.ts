import { answerOf, LockError, warn } from './errors.js'
import { native } from './native.js'
import { ttlOf } from './durations.js'
import { LossSignal } from './signals.js'
import type { Duration, LockJson, Share, Signal, TransferableLock } from './types.js'

const inspect = Symbol.for('nodejs.util.inspect.custom')

let isWarned = false
// The native core keeps the number of a lease until its release, or as long as its Lock is alive. The Lock of a job is not registered: its end
// always releases it, and V8 keeps a registered object, and what it refers to, until a collection of the whole heap.
const registry = new FinalizationRegistry<number>((id) => {
  // The lease continues. A program may acquire a lock for its whole life and keep no reference to it. A release by the garbage
  // collector would give the name to a second holder.
  const name = native.forget(id)
  if (name == null || isWarned) return
  isWarned = true
  warn(
    'HOLDFAST_NOT_RELEASED',
    `the Lock of ${JSON.stringify(name)} was garbage collected while it was held. It is renewed until this process ends or its ` +
      'LockService is closed. Keep a reference to the Lock and call release(), or use `await using` or using(). ' +
      'Later locks are not warned about.',
  )
})

/**
 * @internal Creates a `Lock` from the number of its lease; 0 for a job without a permit. `prefix` is that of a view, which errors omit;
 * `share` its share, if the name is a shared one.
 */
export let createLock: (id: number, names: string | string[], prefix: string, share?: Share) => Lock
/** @internal Has the number of a `Lock` removed when the `Lock` is garbage collected. A job needs that only after a loss. */
export let registerLock: (lock: Lock) => Lock
/** @internal Releases the lock of `using` or `acquireAndExecute`. Resolves to the JSON text of its loss, or to `null`. */
export let finishLock: (lock: Lock) => Promise<string | null>

/** @internal Keeps the name of a lock busy after its release, until `ms` milliseconds have passed since the grant. */
export let holdAtLeast: (lock: Lock, ms: number) => void
/** @internal Aborts the signal of a lock that stays held. */
export let abortSignal: (lock: Lock, reason: unknown) => void

/**
 * A held lock. Release it with `release()` or `await using`. A lock that is renewed and dropped without a release stays held
 * until the process ends or the service is closed. When such a lock is garbage collected, one `HoldfastWarning` names it.
 *
 * @example
 * await using lock = await locks.acquire('order:42', { ttlMs: 30_000 })
 */
export class Lock implements AsyncDisposable {
  static {
    createLock = (id, names, prefix, share) => new Lock(id, names, prefix, share)
    registerLock = (lock) => {
      registry.register(lock, lock.#id, lock)
      return lock
    }
    holdAtLeast = (lock, ms) => native.setMinHold(lock.#id, ms)
    abortSignal = (lock, reason) => lock.#lossSignal().abort(reason)
    finishLock = async (lock) => {
      try {
        // Not released by this call: the job released it, and may have had no answer.
        if (!lock.#end(await native.finish(lock.#id)) && lock.#ended === undefined) registerLock(lock)
        return null
      } catch (loss) {
        registerLock(lock)
        return loss as string
      } finally {
        lock.#signal?.released()
      }
    }
  }

  readonly #id: number
  readonly #names: string | string[]
  readonly #prefix: string
  readonly #share: Share | undefined
  #signal: LossSignal | undefined
  /** The description of a lease that was released, or never acquired. */
  #ended: string | undefined

  private constructor(id?: number, names?: string | string[], prefix = '', share?: Share) {
    if (id === undefined || names === undefined) {
      const origin = 'a Lock comes from acquire, tryAcquire, using or restore of a LockService, not from new'
      throw new LockError('LOCK_INVALID_ARGUMENT', origin)
    }
    this.#id = id
    this.#names = names
    this.#prefix = prefix
    this.#share = share
    if (id === 0) this.#ended = ' 0 0 false'
  }

  /** The (first) name. */
  get name(): string {
    return typeof this.#names === 'string' ? this.#names : this.#names[0]!
  }

  /** All names in the order of the call, without duplicates. */
  get names(): string[] {
    return typeof this.#names === 'string' ? [this.#names] : [...new Set(this.#names)]
  }

  /**
   * The number of permits: of a semaphore those of the call, of a lock and of a reader 1, of a writer 1048576. 0 for a job that runs without
   * a permit (`onStoreError: 'run'`).
   */
  get permits(): number {
    return this.#share?.permits ?? 1
  }

  /** The owner token: 32 random hexadecimal digits, new for each acquisition and each `restore()`. */
  get token(): string {
    return this.#describe()[0]!
  }

  /**
   * The fencing token: larger than that of every earlier grant of the name. Store it with each write, and reject a write
   * with a smaller token than the stored one: a former holder, whose lease has ended, can then overwrite nothing. Of a
   * semaphore it only identifies the grant; of a read/write lock store the token of writers only.
   */
  get fencingToken(): bigint {
    return BigInt(this.#describe()[1]!)
  }

  /**
   * The rest of the lease in milliseconds, by the clock of this process; 0 after the release or loss. It ends earlier than in the
   * store: the ttl counts from the sending of the request, less 1 % and 2 ms. For some 10 to 50 ms after a wait it is at most 4500
   * (MongoDB replica set, etcd, ZooKeeper: 2000), until a renewal extends the lease to its ttl. `extend()` waits for that renewal.
   */
  get remainingMs(): number {
    return native.remainingMs(this.#id)
  }

  /** Whether the lease is held: `remainingMs` is not 0. Computed at each read, so also right after the process was suspended. */
  get isHeld(): boolean {
    return native.isHeld(this.#id)
  }

  /**
   * Aborts when the lease is lost, with a `LOCK_LOST` error as `reason`. A release does not abort it. Its listeners run in the
   * `AsyncLocalStorage` context in which it was first read.
   */
  get signal(): Signal {
    return this.#lossSignal().signal
  }

  #lossSignal(): LossSignal {
    return (this.#signal ??= new LossSignal(this.#id, this, this.#prefix))
  }

  /**
   * Extends the lease to at least `ttlMs` milliseconds from now on. Later renewals use this ttl as well. Never shortens the
   * lease.
   * @param ttlMs more than 0, at most 2147483648 (2^31) ms, or text with a unit
   * @throws `LOCK_LOST` when the lease is lost or was released, or when it ends before the store answers; `LOCK_STORE`, `LOCK_CLOSED`,
   * `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * await lock.extend('1m')
   */
  async extend(ttlMs: Duration): Promise<void> {
    const ms = ttlOf(ttlMs)
    if (this.#ended !== undefined) {
      const why = this.#id === 0 ? 'the job runs without a permit' : 'it was released'
      const message = `the lock ${JSON.stringify(this.name)} is lost: ${why}`
      throw new LockError('LOCK_LOST', message, { key: this.name })
    }
    await answerOf(native.extend(this.#id, ms), this.#prefix)
  }

  /**
   * Releases the lock. `isHeld` is `false` from the call on.
   * @returns `true`: it was held until this call, which released it. `false`: it was released before, or is lost. `true` is an
   * assumption if the store no longer has the lock, and either the reply to an earlier request was lost, or the answer came after
   * the end of the lease: before this call the store may have lost its data, or another process may have restored the lock
   * @throws `LOCK_STORE` when the store did not answer within `storeTimeoutMs`; the release is repeated in the background
   *
   * @example
   * if (!(await lock.release())) console.log('it was lost')
   */
  async release(): Promise<boolean> {
    try {
      return this.#end(await answerOf(native.release(this.#id), this.#prefix))
    } finally {
      this.#signal?.released()
    }
  }

  /**
   * Releases the lock like `release()`, but never rejects, so that it hides no error of the block.
   *
   * @example
   * await using lock = await locks.acquire('order:42')
   */
  async [Symbol.asyncDispose](): Promise<void> {
    try {
      this.#end(await native.release(this.#id))
    } catch {
      // The release is repeated in the background.
    }
    this.#signal?.released()
  }

  /**
   * Returns what another process needs to transfer the lock to itself with `locks.restore()`. The owner token in it is the
   * right to do that: treat it as a secret. It is valid for one `restore()`.
   * @throws `LOCK_INVALID_ARGUMENT` for a permit of a semaphore and for a side of a read/write lock, which cannot be transferred
   *
   * @example
   * channel.send(JSON.stringify(lock.transferable())) // there: await locks.restore(text)
   */
  transferable(): TransferableLock {
    if (this.#share) {
      const rule =
        'transferable() must be called on a lock, which can be transferred: not on a permit, a reader or a writer'
      throw new LockError('LOCK_INVALID_ARGUMENT', rule)
    }
    const [token, fencingToken, ttlMs, renew, ...metadata] = this.#describe()
    const lock = {
      names: this.names,
      token: token!,
      fencingToken: fencingToken!,
      ttlMs: Number(ttlMs),
      renew: renew === 'true',
    }
    const json = metadata.join(' ')
    return json === '' ? lock : { ...lock, metadata: JSON.parse(json) }
  }

  /**
   * Returns what `JSON.stringify` shows, for logs: never the owner token. {@link transferable} returns it.
   *
   * @example
   * console.log(JSON.stringify({ message: 'acquired', lock }))
   */
  toJSON(): LockJson {
    const { name, names, isHeld, remainingMs } = this
    return { name, names, fencingToken: this.#describe()[1]!, isHeld, remainingMs }
  }

  /** @internal Returns what `console.log` shows; never the owner token, which is the right to release. */
  [inspect](): object {
    return { names: this.names, fencingToken: this.fencingToken, isHeld: this.isHeld, remainingMs: this.remainingMs }
  }

  /** Returns the parts of the description of the lease (`describe` in `addon.d.ts`). */
  #describe(): string[] {
    return (this.#ended ?? native.describe(this.#id)!).split(' ')
  }

  /** Handles the end of a release. Returns whether it released the lease, whose number is not needed any more. */
  #end(description: string | null): boolean {
    if (description === null) return false
    this.#ended = description
    registry.unregister(this)
    native.forget(this.#id)
    return true
  }
}
