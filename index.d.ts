/// <reference lib="es2020" />
/// <reference lib="esnext.disposable" />

/**
 * The platform's `AbortSignal` where its types are loaded (the DOM library, `@types/node`), else the part of it that
 * holdfast uses.
 */
export type Signal = typeof globalThis extends { AbortSignal: { prototype: infer T } } ? T : SignalLike

/** What holdfast asks of an `AbortSignal`. Signals of other realms and of polyfills fit. */
export interface SignalLike {
  readonly aborted: boolean
  readonly reason?: any
  addEventListener(type: 'abort', listener: () => void): void
  removeEventListener(type: 'abort', listener: () => void): void
}

/** Where a store is: a URL as text, or a `URL` object. */
export type Target = string | { readonly href: string }

/** A duration: a number of milliseconds, or text with a unit, such as `'250ms'`, `'30s'`, `'5m'` or `'1h'`. */
export type Duration = number | `${number}${'ms' | 's' | 'm' | 'h'}`

/** What `JSON.stringify` carries. */
export type Json = string | number | boolean | null | readonly Json[] | { readonly [key: string]: Json | undefined }

/**
 * - `LOCK_INVALID_ARGUMENT`: an argument is outside what the function takes; nothing reached the store.
 * - `LOCK_TIMEOUT`: the name stayed busy for all of `waitMs`. Only `acquire` and `using` reject with it.
 * - `LOCK_LOST`: the lease ended before it was released.
 * - `LOCK_CLOSED`: the `LockService` is closed.
 * - `LOCK_STORE`: the store failed, did not answer within `storeTimeoutMs`, or granted the lock so late that the lease was over.
 */
export type LockErrorCode = 'LOCK_INVALID_ARGUMENT' | 'LOCK_TIMEOUT' | 'LOCK_LOST' | 'LOCK_CLOSED' | 'LOCK_STORE'

/** How a lock is taken with `acquire`, `tryAcquire` and `using`. Times are in milliseconds. */
export interface AcquireOptions {
  /**
   * How long the lease lasts from each grant and renewal: more than 0, at most 2147483648 (2^31) ms.
   * @default 30000
   */
  ttlMs?: Duration | undefined
  /**
   * How long to wait for a busy name; `Infinity` is allowed, 0 is one try. `tryAcquire` does not wait, whatever this says.
   * A store that is slow to answer may hold a call up for longer: it is given 1 s at least.
   * @default 10000
   */
  waitMs?: Duration | undefined
  /**
   * Whether a native thread renews the lease at a third of its ttl, also while the event loop is blocked. Leases that are
   * due at about the same time are renewed together, up to a tenth of that third early.
   * @default true
   */
  renew?: boolean | undefined
  /** Ends the wait: the promise rejects with `signal.reason`, and nothing is left in the store. */
  signal?: SignalLike | undefined
  /**
   * The lease ends at the latest so long after it was acquired, renewed or not.
   * @default no limit
   */
  maxHoldMs?: Duration | undefined
  /**
   * Renewal pauses while the event loop has not answered for so long: a process that hangs for good must not hold its
   * locks for ever.
   * @default 300000
   */
  stallLimitMs?: Duration | undefined
  /**
   * A release before so much time has passed keeps the name busy until then: for short jobs on machines whose clocks
   * differ, which would otherwise run one after the other.
   * @default 0
   */
  minHoldMs?: Duration | undefined
  /** Kept beside the lock while it is held, and shown by `inspect` and `list`. At most 16384 bytes of JSON. */
  metadata?: Json | object | undefined
}

/** The object form of `acquireAndExecute`. */
export interface ExecuteOptions {
  /** The lock's name: 1 to 512 bytes of UTF-8. */
  name: string
  /**
   * The lease in **seconds** (fractions allowed): the longest that the job blocks the next one unless `renew` is set.
   * @default 30
   */
  ttlSeconds?: number | undefined
  /**
   * How long to wait for a busy name, in milliseconds.
   * @default 0
   */
  waitMs?: Duration | undefined
  /**
   * Whether the lease is renewed while `fn` runs.
   * @default false
   */
  renew?: boolean | undefined
  /**
   * A job that ends sooner keeps the name busy until then, in milliseconds.
   * @default 0
   */
  minHoldMs?: Duration | undefined
  /** Ends the wait; the promise rejects with `signal.reason`. */
  signal?: SignalLike | undefined
}

/** PEM files for `rediss://` and for MongoDB with TLS. */
export interface TlsOptions {
  /** The authorities to trust instead of the system's. */
  caFile?: string | undefined
  /** The client's certificate. For MongoDB one file holds certificate and key. */
  certFile?: string | undefined
  /** The client's private key (Redis). */
  keyFile?: string | undefined
  /**
   * Accept any certificate. For tests only.
   * @default false
   */
  insecure?: boolean | undefined
}

/** The defaults of one service, where its calls do not say otherwise. */
export type Defaults = Pick<
  AcquireOptions,
  'ttlMs' | 'waitMs' | 'renew' | 'maxHoldMs' | 'stallLimitMs' | 'minHoldMs'
>

/** How to connect. */
export interface ConnectOptions {
  /**
   * Put in front of every name in the store. May be empty.
   * @default 'lock:' on Redis, '' elsewhere
   */
  keyPrefix?: string | undefined
  /**
   * MongoDB's collection.
   * @default 'locks'
   */
  collection?: string | undefined
  /**
   * SQLite's table, and the beginning of the names of its companions.
   * @default 'locks'
   */
  table?: string | undefined
  /**
   * The longest that one call waits for the store, in milliseconds, before it rejects with `LOCK_STORE`.
   * @default 5000
   */
  storeTimeoutMs?: Duration | undefined
  /**
   * Redis with replicas: a lock counts as acquired, renewed or restored only when so many replicas have acknowledged it,
   * so that a fail-over to one of them cannot give it away. What they do not acknowledge in time (an eighth of
   * `storeTimeoutMs`) is given back, and is a retryable `LOCK_STORE`. A whole number from 0 to 100; for `redis://`,
   * `rediss://`, `redis+sentinel://` and `rediss+sentinel://` only.
   * @default 0
   */
  minReplicas?: number | undefined
  /**
   * Defaults for the calls of this service. All but `waitMs` and `renew` count for the gist's functions, too: those make
   * one try and are not renewed.
   */
  defaults?: Defaults | undefined
  /** Certificates. */
  tls?: TlsOptions | undefined
  /** Told of every lease. What it throws is reported as a warning and changes nothing. */
  onEvent?: ((event: LockEvent) => void) | undefined
}

/** What every event has. */
export interface EventBase {
  /** The first of `names`. */
  readonly name: string
  readonly names: readonly string[]
}

/** A lease was granted. */
export interface AcquiredEvent extends EventBase {
  readonly type: 'acquired'
  readonly fencingToken: bigint
  /** How long the call took to get it, in milliseconds. */
  readonly waitedMs: number
}

/** A lease was released by its holder. */
export interface ReleasedEvent extends EventBase {
  readonly type: 'released'
  readonly fencingToken: bigint
  /** For how long it was held, in milliseconds. */
  readonly heldMs: number
}

/** A lease was renewed. */
export interface RenewedEvent extends EventBase {
  readonly type: 'renewed'
  readonly fencingToken: bigint
}

/** A lease ended before its holder released it. */
export interface LostEvent extends EventBase {
  readonly type: 'lost'
  readonly fencingToken: bigint
  /** For how long it was held, in milliseconds. */
  readonly heldMs: number
  /** Why, in one sentence. */
  readonly reason: string
}

/** A call found its name busy and waits. */
export interface WaitingEvent extends EventBase {
  readonly type: 'waiting'
}

/** What `onEvent` is told; `type` tells which event it is. */
export type LockEvent = AcquiredEvent | ReleasedEvent | RenewedEvent | LostEvent | WaitingEvent

/** What is known of a held lock. */
export interface LockInfo {
  readonly name: string
  /** How long the lease still lasts by the store's clock; `Infinity` for another tool's lock that never expires. */
  readonly remainingMs: number
  /** `null` when another tool holds the name. */
  readonly fencingToken: bigint | null
  /** Who holds it; `null` when another tool does. `since` is by the store's clock. */
  readonly holder: { readonly host: string; readonly pid: number; readonly since: Date } | null
  /** What the holder gave as `metadata`, else `null`. */
  readonly metadata: Json
}

/** Counts since `connect`; `held` and `waiting` are those of this moment. */
export interface LockStats {
  readonly held: number
  /** Calls that wait for a busy name. */
  readonly waiting: number
  readonly acquired: number
  /** Calls that ended with the name busy. */
  readonly busy: number
  readonly released: number
  readonly renewed: number
  readonly lost: number
  /** Operations that the store failed or did not answer in time, those that were tried again included. */
  readonly storeErrors: number
}

/** What `lock.toJSON()` gives and `locks.restore()` takes. */
export interface LockJson {
  readonly names: readonly string[]
  readonly token: string
  /** The fencing token in decimal digits: JSON has no bigint. */
  readonly fencingToken: string
  readonly ttlMs: number
  readonly renew: boolean
  readonly metadata?: Json
}

/**
 * The error of every rejection of holdfast, except that an aborted wait rejects with `signal.reason` itself. `code` says which
 * case it is. `instanceof` narrows `code`; {@link isLockError} also knows errors of another copy of this package.
 */
export declare class LockError extends Error {
  readonly name: 'LockError';
  readonly code: LockErrorCode;
  /** Whether the same call may succeed later without a change to it. */
  readonly retryable: boolean;
  /** The name of the lock, where the error concerns one. */
  readonly key?: string;
  /** The store (`redis`, `mongodb`, `sqlite`, …), where the error came from it. */
  readonly engine?: string;
  /** The error of the store's driver. For `using`: what `fn` threw, when the lock was lost as well. */
  readonly cause?: unknown;
  constructor(code: LockErrorCode, message: string, details?: {
    retryable?: boolean;
    key?: string | undefined;
    engine?: string | undefined;
    cause?: unknown;
  });
}
/**
 * Whether a value is a {@link LockError}, of this or another copy of this package.
 *
 * @param code narrows to one code
 */
export declare function isLockError<Code extends LockErrorCode = LockErrorCode>(value: unknown, code?: Code): value is LockError & {
  readonly code: Code;
};

/**
 * A held lock. Release it with `release()`, or let `await using` do it. A lock that is renewed and dropped without a release
 * stays held until the process ends or the service is closed. When it is garbage collected, one `HoldfastWarning` names it.
 *
 * @example
 * await using lock = await locks.acquire('order:42', { ttlMs: 30_000 })
 */
export declare class Lock implements AsyncDisposable {
  private constructor();
  /** The (first) name. */
  get name(): string;
  /** All names, in the order given, without repeats. */
  get names(): string[];
  /** The owner: 32 random hexadecimal digits, fresh per acquisition and per `restore()`. */
  get token(): string;
  /**
   * Strictly larger than that of every earlier holder of the name. Store it with what you write, and refuse a write
   * that carries a smaller one than is stored: a holder that outlived its lease can then do no harm.
   */
  get fencingToken(): bigint;
  /**
   * How long the lease still counts for this process, in milliseconds; 0 once it is released or lost. The cautious
   * view: counted from the sending of the request, less 1 % and 2 ms.
   */
  get remainingMs(): number;
  /** Whether the lease still counts. True to the clock at any line, also right after the process was suspended. */
  get isHeld(): boolean;
  /** Aborts when the lease is lost, with a `LOCK_LOST` error as `reason`. Never on a normal release. */
  get signal(): Signal;
  /**
   * Makes the lease last at least `ttlMs` milliseconds from now on, and each later renewal ask for it. Never shortens.
   * @throws `LOCK_LOST` when the lease is gone, `LOCK_STORE`, `LOCK_CLOSED`
   */
  extend(ttlMs: Duration): Promise<void>;
  /**
   * Releases the lock. `isHeld` is false as soon as this is called.
   * @returns `true`: this call freed it. `false`: it was released before, or is lost
   * @throws `LOCK_STORE` when the store did not answer the release in time; it is repeated in the background
   */
  release(): Promise<boolean>;
  /** As `release()`, but never rejects: a failing store does not hide what the block did. */
  [Symbol.asyncDispose](): Promise<void>;
  /**
   * What another process needs to take the lock over with `locks.restore()`. The token in it is the right to do so:
   * treat it as a secret. It is good for one `restore()`.
   */
  toJSON(): LockJson;
}

/**
 * A lock service over one store. Create one per process with `LockService.connect`. Its methods may be detached:
 * `const { acquire } = locks`.
 */
export declare class LockService implements AsyncDisposable {
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
  static connect(target?: Target | readonly Target[], options?: ConnectOptions): Promise<LockService>;
  static connect(options: ConnectOptions & {
    url?: Target | readonly Target[] | undefined;
  }): Promise<LockService>;
  private constructor();
  /**
   * The gist's: one try, held until released or expired, not renewed. A name that this service holds is busy for itself
   * too.
   * @param ttlSeconds in **seconds**, fractions allowed @default 30
   * @returns `true`: held by this service. `false`: it is busy, or the lease ended before a blocked event loop received it
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  acquireLock(name: string, ttlSeconds?: number): Promise<boolean>;
  /**
   * The gist's `releaseLock`: releases what `acquireLock` of this service acquired, and never another holder's lock.
   * @returns `true`: this call freed it. `false`: this service held nothing (never acquired, expired, taken over)
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  releaseLock(name: string): Promise<boolean>;
  /**
   * The gist's: one try; calls `fn` under the lock, releases, and passes on what `fn` returned or threw. Not renewed
   * unless asked for: the ttl is the longest that the job blocks the next one.
   * @returns `undefined`, without calling `fn`, when the name is busy
   * @throws what `fn` throws, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  acquireAndExecute<T>(options: ExecuteOptions, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>;
  acquireAndExecute<T>(name: string, ttlSeconds: number | undefined, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>;
  acquireAndExecute<T>(name: string, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>;
  /**
   * Takes a lock, or several names all or nothing, and waits for it.
   * @throws `LOCK_TIMEOUT` when it is still busy after `waitMs`, `signal.reason` when aborted, `LOCK_STORE`,
   * `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  acquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock>;
  /**
   * One try.
   * @returns `null` when a name is busy
   * @throws `signal.reason` when aborted, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  tryAcquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock | null>;
  /**
   * Acquires, renews, runs `fn`, releases.
   * @throws `LOCK_LOST` once `fn` has settled when the lease was lost under it (`cause`: what `fn` threw, if it did),
   * else what `fn` throws; `LOCK_TIMEOUT`, `signal.reason`, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  using<T>(names: string | readonly string[], options: AcquireOptions | undefined, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>;
  using<T>(names: string | readonly string[], fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>;
  /**
   * Takes over a lock that was acquired elsewhere, from its `toJSON()` (or the text of it), and gives it a fresh token.
   * Whoever had it before can neither extend nor free it from then on, and learns of the loss at its next renewal, or at
   * its next use: hand a lock over only when you are done with it.
   * @throws `LOCK_LOST` when the lease is gone (taken over before, too), `LOCK_STORE`, `LOCK_CLOSED`,
   * `LOCK_INVALID_ARGUMENT`
   */
  restore(json: LockJson | string): Promise<Lock>;
  /** Who holds a name; `null` when it is free. */
  inspect(name: string): Promise<LockInfo | null>;
  /** Everything held whose name starts with `prefix` (literal text, no pattern), sorted by name in byte order. */
  list(options?: {
    prefix?: string | undefined;
  }): Promise<LockInfo[]>;
  /**
   * Releases a name, no matter which owner holds it. The holder loses the lock at its next renewal.
   * @returns `true`: the name was held and is free now. `false`: it was free
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  forceRelease(name: string): Promise<boolean>;
  /** This service's counters. */
  stats(): LockStats;
  /**
   * Releases what is held, ends the waits with `LOCK_CLOSED`, gives back connections. Later calls reject with
   * `LOCK_CLOSED`. May be called again. Whoever still works under a lock did not let go of it: its `signal` aborts with
   * `LOCK_LOST`, and `using` rejects with it.
   */
  close(): Promise<void>;
  /** As `close()`. */
  [Symbol.asyncDispose](): Promise<void>;
}
