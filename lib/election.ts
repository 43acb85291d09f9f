import { acquire, IN_BACKGROUND } from './connection.js'
import type { Connection } from './connection.js'
import { isLockError, LockError, stackOf, warn } from './errors.js'
import { abortSignal, finishLock } from './lock.js'
import type { Lock } from './lock.js'
import { native } from './native.js'
import { callback, ELECT, fields, flag, limitOf, nameOf, requestOf, signalOf, UNLIMITED } from './options.js'
import type { Request, Side } from './options.js'
import { begin, end } from './run.js'
import { newTicket } from './signals.js'
import type { AcquireOptions, Signal, SignalLike } from './types.js'

/** The first pause before a further campaign; each further one is twice as long. In milliseconds. */
const FIRST_PAUSE_MS = 100
const LONGEST_PAUSE_MS = 30_000
/** After a shorter leadership a pause follows, whatever ended it. */
const SHORT_MS = 1000
/** A leadership that lasted for this long makes the next pause the first one again. */
const STEADY_MS = 60_000

/** A leadership in progress. */
interface Term {
  readonly lock: Lock
  /** Resolves when `fn` has settled and the lock is released. */
  readonly ended: Promise<void>
  /** Whether `resign` or `stop` has ended it. */
  isEnding: boolean
}

/** @internal Creates an `Election`, which begins at once. */
export let createElection: (connection: Connection, name: unknown, second: unknown, third: unknown) => Election

/** The options of `elect`. The `minHoldMs` and `maxHoldMs` of the service's `defaults` do not apply. */
export interface ElectOptions extends Pick<AcquireOptions, 'ttlMs' | 'stallLimitMs' | 'metadata'> {
  /**
   * The number of candidates that lead at the same time: a whole number from 1 to 1048576. All candidates of a name set the same one; while
   * they differ, the smallest one of the call and of all leaders applies. With 1 a leader holds the lock of the name, with more a permit of
   * the semaphore of the name: candidates of the two kinds do not exclude each other. With more than 1 `term` identifies the leadership,
   * but cannot refuse an earlier leader, because several lead at the same time; and the stores are those of `LockService.semaphore`.
   * @default 1
   */
  maxLeaders?: number | undefined
  /** Ends the election like `stop()`. */
  signal?: SignalLike | undefined
  /**
   * What follows an error of `fn`, and a store error that is not retryable, such as a wrong password. `false`: the election ends,
   * and `done` rejects with the error. `true`: this candidate waits for the leadership again, after a pause of 100 ms that
   * doubles up to 30 s, until a leadership lasts a minute. The pause also follows a return of `fn`, and a leadership below 1 s.
   * @default false
   */
  restart?: boolean | undefined
  /**
   * With `restart`: receives these errors (of store errors the first until the next leadership). If it throws, the election ends.
   * @default a `HoldfastWarning` (`HOLDFAST_ELECTION`) with the error
   */
  onError?: ((error: unknown) => void) | undefined
  /**
   * Lets the process exit while this is the only thing that it waits for. The attempt of a `lazy` service to connect keeps the process
   * alive, for at most `storeTimeoutMs`.
   * @default false
   */
  unref?: boolean | undefined
}

/** The leadership that `fn` of `elect` gets. */
export interface Leadership {
  readonly name: string
  /** The fencing token: larger than that of every earlier leader. With one leader, pass it to what must refuse an earlier leader. */
  readonly term: bigint
  /** Aborts when the leadership ends: after a loss with a `LOCK_LOST` error, after `resign()` and `stop()` with an `AbortError`. */
  readonly signal: Signal
  /** Whether this leadership lasts, computed at each read by the native clock. */
  readonly isLeader: boolean
  /** The rest of the lease in milliseconds, by the clock of this process. */
  readonly remainingMs: number
}

/**
 * A candidate for the leadership of a name, from `locks.elect()`. It waits in the queue of the name until it leads.
 *
 * @example
 * const election = locks.elect('scheduler', { ttlMs: '10s' }, ({ signal }) => runScheduler(signal))
 * console.log(election.isLeader, election.term)
 * await election.stop()
 */
export class Election implements AsyncDisposable {
  static {
    createElection = (connection, name, second, third) => new Election(connection, name, second, third)
  }

  readonly #done: Promise<void>
  /** Whether `done` was read. Then its reader receives the error, and no warning is emitted. */
  #isObserved = false
  readonly #connection: Connection
  readonly #name: string
  readonly #request: Request
  readonly #fn: (leadership: Leadership) => unknown
  readonly #options: ElectOptions
  /** Cancels the wait for the leadership. */
  readonly #stopper = new AbortController()
  #term: Term | undefined
  #pauseMs = FIRST_PAUSE_MS
  /** Whether the store fails, and its error was reported. */
  #isStoreReported = false
  /** The ticket of the pause between two campaigns. */
  #pauseTicket: number | undefined

  private constructor(connection?: Connection, name?: unknown, second?: unknown, third?: unknown) {
    if (connection?.elections === undefined) {
      throw new LockError('LOCK_INVALID_ARGUMENT', 'an Election comes from elect of a LockService, not from new')
    }
    const isShort = typeof second === 'function' && third === undefined
    const options = isShort ? undefined : fields('options', second, ELECT)
    this.#connection = connection
    this.#name = nameOf(name)
    this.#fn = callback('fn', isShort ? second : third)
    this.#options = {
      restart: options?.['restart'] === undefined ? false : flag('restart', options['restart']),
      unref: options?.['unref'] === undefined ? false : flag('unref', options['unref']),
      onError: options?.['onError'] === undefined ? undefined : callback('onError', options['onError']),
      signal: options?.['signal'] === undefined ? undefined : signalOf(options['signal']),
    }
    const { ttlMs, stallLimitMs, metadata, maxLeaders = 1 } = options ?? {}
    const limit = limitOf(maxLeaders, 'maxLeaders')
    const side: Side | undefined = limit === 1 ? undefined : { kind: 'semaphore', known: ELECT, permits: 1, limit }
    const request = requestOf({ ttlMs, stallLimitMs, metadata, onStoreError: 'wait', renew: true }, true, side)
    this.#request = {
      ...request,
      more: { ...request.more, ...UNLIMITED },
      waitMs: Infinity,
      signal: this.#stopper.signal,
    }
    this.#done = this.#run(this.#options.signal)
    // A rejection that nothing handles would end the process.
    this.#done.catch((thrown) => {
      if (!this.#isObserved) this.#warn('election of', 'has ended', thrown)
    })
  }

  /**
   * Resolves when the election has ended: after `stop()`, an abort of the option `signal`, or `close()` of the service, when `fn`
   * has settled and the lock is released. Rejects with `LOCK_CLOSED` if the service was closed before; without `restart`, with
   * what `fn` threw, and with a `LOCK_STORE` that is not retryable, such as a wrong password. If `done` was not read before that,
   * the error is emitted as a `HoldfastWarning` (`HOLDFAST_ELECTION`). The rejection never ends the process by itself.
   */
  get done(): Promise<void> {
    this.#isObserved = true
    return this.#done
  }

  /** Whether this candidate leads now, by the native clock. `false` from `resign()`, `stop()` and a loss on. */
  get isLeader(): boolean {
    return this.#term !== undefined && !this.#term.isEnding && this.#term.lock.isHeld
  }

  /** The fencing token of the current leadership: larger than that of every earlier leader. `null` while this candidate waits. */
  get term(): bigint | null {
    return this.isLeader ? this.#term!.lock.fencingToken : null
  }

  /**
   * Ends the current leadership: aborts its `signal`, waits until `fn` has settled, and releases the lock. Then this candidate
   * waits at the end of the queue. On a store without a queue it may lead again at once. Without a leadership it has no effect. Do not
   * await it in `fn`, which it waits for.
   *
   * @example
   * const election = locks.elect('scheduler', ({ signal }) => runScheduler(signal))
   * await election.resign()
   * await election.stop()
   */
  async resign(): Promise<void> {
    await this.#end('the leader resigned')
  }

  /**
   * Ends the election: like {@link resign}, but does not lead again. Resolves when `fn` has settled and the lock is released, and
   * never rejects: {@link done} does. Do not await it in `fn`.
   *
   * @example
   * const election = locks.elect('scheduler', ({ signal }) => runScheduler(signal))
   * process.once('SIGTERM', () => election.stop())
   * await election.stop()
   */
  async stop(): Promise<void> {
    this.#stopper.abort()
    if (this.#pauseTicket !== undefined) native.cancel(this.#pauseTicket)
    await this.#end('the election was stopped')
    await this.#done.catch(() => {})
  }

  /**
   * Ends the election like {@link stop}.
   *
   * @example
   * await using election = locks.elect('scheduler', ({ signal }) => runScheduler(signal))
   */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop()
  }

  async #end(why: string): Promise<void> {
    const term = this.#term
    if (term === undefined) return
    if (!term.isEnding) {
      term.isEnding = true
      abortSignal(term.lock, new DOMException(why, 'AbortError'))
    }
    await term.ended
  }

  async #run(signal: SignalLike | undefined): Promise<void> {
    const { elections } = this.#connection
    const stop = () => void this.stop()
    elections.add(this)
    if (!this.#options.unref) begin(this.#connection)
    try {
      signal?.addEventListener('abort', stop)
      if (signal?.aborted) stop()
      for (let lock = await this.#campaign(); lock !== null; lock = await this.#campaign()) await this.#lead(lock)
    } finally {
      signal?.removeEventListener('abort', stop)
      if (!this.#options.unref) end(this.#connection)
      elections.delete(this)
    }
  }

  /** Waits for the leadership. Resolves to `null` when the election has ended. */
  async #campaign(): Promise<Lock | null> {
    while (!this.#stopper.signal.aborted) {
      try {
        const flags = this.#options.unref ? IN_BACKGROUND : 0
        const lock = await acquire(this.#connection, this.#name, this.#request, flags)
        this.#isStoreReported = false
        return lock
      } catch (thrown) {
        if (this.#stopper.signal.aborted) return null
        if (!isLockError(thrown, 'LOCK_STORE')) throw thrown
        // A retryable one: for example, the grant arrived after the end of its lease.
        if (!thrown.retryable && !this.#isStoreReported) {
          await this.#report('candidate for', thrown)
          this.#isStoreReported = true
        }
        await this.#pause()
      }
    }
    return null
  }

  /** Calls `fn` with a leadership, until it has settled, and releases the lock. Throws what `fn` threw. */
  async #lead(lock: Lock): Promise<void> {
    let ended!: () => void
    const term: Term = { lock, ended: new Promise<void>((resolve) => (ended = resolve)), isEnding: false }
    this.#term = term
    // A stop during the grant.
    if (this.#stopper.signal.aborted) void this.#end('the election was stopped')
    const ticket = newTicket()
    const lasting = native.pause(STEADY_MS, ticket, true)
    let failure: { thrown: unknown } | undefined
    try {
      await this.#fn(leadershipOf(this, lock))
    } catch (thrown) {
      failure = { thrown }
    }
    const { signal } = lock
    const hasEndedItself = !signal.aborted
    await finishLock(lock)
    this.#term = undefined
    native.cancel(ticket)
    ended()
    if (failure && !isCausedBy(failure.thrown, signal)) await this.#report('leader of', failure.thrown)
    const lastedMs = await lasting
    if (lastedMs >= STEADY_MS) this.#pauseMs = FIRST_PAUSE_MS
    if (hasEndedItself || lastedMs < SHORT_MS) await this.#pause()
  }

  /** Handles an error of `fn` or of the store. Throws it unless `restart` is set. */
  async #report(who: string, thrown: unknown): Promise<void> {
    const { restart, onError } = this.#options
    if (!restart) throw thrown
    if (onError) return await onError(thrown)
    this.#warn(who, this.#stopper.signal.aborted ? 'failed' : 'failed, and is a candidate again', thrown)
  }

  #warn(who: string, what: string, thrown: unknown): void {
    warn('HOLDFAST_ELECTION', `the ${who} ${JSON.stringify(this.#name)} ${what}: ${stackOf(thrown)}`)
  }

  /** Waits before the next campaign, so that an `fn` that ends at once causes no load. The random part keeps processes apart. */
  async #pause(): Promise<void> {
    if (this.#stopper.signal.aborted) return
    const ms = this.#pauseMs * (0.75 + Math.random() / 2)
    this.#pauseMs = Math.min(2 * this.#pauseMs, LONGEST_PAUSE_MS)
    const ticket = (this.#pauseTicket = newTicket())
    await native.pause(ms, ticket, this.#options.unref === true)
    this.#pauseTicket = undefined
  }
}

/** Creates what `fn` gets. */
function leadershipOf(election: Election, lock: Lock): Leadership {
  return {
    name: lock.name,
    term: lock.fencingToken,
    signal: lock.signal,
    get isLeader() {
      return election.isLeader && election.term === this.term
    },
    get remainingMs() {
      return lock.remainingMs
    },
  }
}

/**
 * Whether an error of `fn` is the consequence of the abort of its signal: the reason itself, as `fetch` throws it, or an `AbortError` with
 * this cause, as the functions of Node throw it. Other libraries throw an `AbortError` without a cause.
 */
function isCausedBy(thrown: unknown, signal: SignalLike): boolean {
  if (!signal.aborted) return false
  if (thrown === signal.reason) return true
  const { name, cause } = Object(thrown) as { name?: unknown; cause?: unknown }
  return name === 'AbortError' && (cause === undefined || cause === signal.reason)
}
