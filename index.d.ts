/// <reference lib="es2020" />
/// <reference lib="esnext.disposable" />

/**
 * The platform's `AbortSignal` if its types are loaded (the DOM library, `@types/node`), otherwise the part of it that
 * holdfast uses.
 */
export type Signal = typeof globalThis extends { AbortSignal: { prototype: infer T } } ? T : SignalLike

/** The part of `AbortSignal` that holdfast uses. Signals of other realms and of polyfills are accepted. */
export interface SignalLike {
  readonly aborted: boolean
  readonly reason?: any
  addEventListener(type: 'abort', listener: () => void): void
  removeEventListener(type: 'abort', listener: () => void): void
}

/** The address of a store: a URL as text, or a `URL` object. */
export type Target = string | { readonly href: string }

/** A duration: a number of milliseconds, or text with a unit, such as `'250ms'`, `'30s'`, `'5m'` or `'1h'`. */
export type Duration = number | `${number}${'ms' | 's' | 'm' | 'h'}`

/** A value that `JSON.stringify` preserves. */
export type Json = string | number | boolean | null | readonly Json[] | { readonly [key: string]: Json | undefined }

/**
 * - `LOCK_INVALID_ARGUMENT`: an argument is invalid; nothing was sent to the store.
 * - `LOCK_TIMEOUT`: the name was still busy after `waitMs`. Only `acquire` and `using` reject with it.
 * - `LOCK_LOST`: the lease ended before it was released.
 * - `LOCK_CLOSED`: the `LockService` is closed.
 * - `LOCK_STORE`: the store failed, did not answer within `storeTimeoutMs`, or granted the lock after its lease had expired.
 */
export type LockErrorCode = 'LOCK_INVALID_ARGUMENT' | 'LOCK_TIMEOUT' | 'LOCK_LOST' | 'LOCK_CLOSED' | 'LOCK_STORE'

/** The options of `acquire`, `tryAcquire` and `using`. Durations are in milliseconds, or text with a unit. */
export interface AcquireOptions {
  /**
   * The duration of the lease from each grant and renewal: more than 0, at most 2147483648 (2^31) ms.
   * @default 30000
   */
  ttlMs?: Duration | undefined
  /**
   * The longest time to wait for a busy name: 0 (one attempt) to `Infinity`. `tryAcquire` ignores it and does not wait.
   * With a slow store the call may take longer: the store has at least 1 s to answer.
   * @default 10000
   */
  waitMs?: Duration | undefined
  /**
   * Whether a native thread renews the lease at a third of its ttl, also while the event loop is blocked. Leases that are
   * due at about the same time are renewed together, up to a tenth of that third earlier.
   * @default true
   */
  renew?: boolean | undefined
  /** Cancels the wait: the promise rejects with `signal.reason`, and nothing is left in the store. */
  signal?: SignalLike | undefined
  /**
   * The longest time from the grant to the end of the lease, even if it is renewed: more than 0, at most 2147483648 ms.
   * @default no limit
   */
  maxHoldMs?: Duration | undefined
  /**
   * Renewal pauses while the event loop has not responded for this long: the locks of a process that hangs forever must
   * expire. More than 0, at most 2147483648 ms.
   * @default 300000
   */
  stallLimitMs?: Duration | undefined
  /**
   * The minimum hold: after an earlier release the name stays busy until this time has passed since the grant. For short
   * jobs that machines with different clocks would otherwise run one after the other. 0 to 2147483648 ms.
   * @default 0
   */
  minHoldMs?: Duration | undefined
  /**
   * Stored with the lock while it is held; `inspect` and `list` return it. At most 16384 bytes of JSON.
   * @default none
   */
  metadata?: Json | object | undefined
}

/** The options of `acquireAndExecute`, as an object. */
export interface ExecuteOptions {
  /** The name of the lock: 1 to 512 bytes of UTF-8. */
  name: string
  /**
   * The ttl of the lease in **seconds**, fractions allowed: more than 0, at most 2147483.648. Without `renew` the lock expires
   * after this time.
   * @default 30
   */
  ttlSeconds?: number | undefined
  /**
   * The longest time to wait for a busy name, in milliseconds: 0 to `Infinity`.
   * @default 0
   */
  waitMs?: Duration | undefined
  /**
   * Whether the lease is renewed while `fn` runs.
   * @default false
   */
  renew?: boolean | undefined
  /**
   * The minimum hold in milliseconds: after a shorter job the name stays busy until this time has passed since the grant.
   * @default 0
   */
  minHoldMs?: Duration | undefined
  /** Cancels the wait: the promise rejects with `signal.reason`. */
  signal?: SignalLike | undefined
}

/** TLS settings for `rediss://` and for MongoDB with TLS: paths of PEM files. */
export interface TlsOptions {
  /** The certificate authorities to trust instead of the system's. */
  caFile?: string | undefined
  /** The client's certificate. For MongoDB one file contains certificate and key. */
  certFile?: string | undefined
  /** The client's private key (Redis). */
  keyFile?: string | undefined
  /**
   * Accepts any certificate. For tests only.
   * @default false
   */
  insecure?: boolean | undefined
}

/** The defaults of a service for options that a call does not set. */
export type Defaults = Pick<AcquireOptions, 'ttlMs' | 'waitMs' | 'renew' | 'maxHoldMs' | 'stallLimitMs' | 'minHoldMs'>

/** The options of `LockService.connect`. */
export interface ConnectOptions {
  /**
   * The prefix of every name in the store. May be empty.
   * @default 'lock:' on Redis, '' elsewhere
   */
  keyPrefix?: string | undefined
  /**
   * The collection in MongoDB.
   * @default 'locks'
   */
  collection?: string | undefined
  /**
   * The table in SQLite, and the beginning of the names of the tables that belong to it.
   * @default 'locks'
   */
  table?: string | undefined
  /**
   * The longest time that a call waits for the store, in milliseconds, before it rejects with `LOCK_STORE`: more than 0, at
   * most 2147483648 ms.
   * @default 5000
   */
  storeTimeoutMs?: Duration | undefined
  /**
   * Redis with replicas: the number of replicas that must acknowledge a lock before it counts as acquired, renewed or
   * restored, so that the lock survives a failover to one of them. A grant that they do not acknowledge in time (an
   * eighth of `storeTimeoutMs`) is rolled back, and rejects with a retryable `LOCK_STORE`. A whole number from 0 to 100; for
   * `redis://`, `rediss://`, `redis+sentinel://` and `rediss+sentinel://` only.
   * @default 0
   */
  minReplicas?: number | undefined
  /**
   * Defaults for the calls of this service. They also apply to the gist's functions, except for `waitMs` and `renew`: those
   * functions make one attempt, and their leases are not renewed.
   */
  defaults?: Defaults | undefined
  /** TLS settings. */
  tls?: TlsOptions | undefined
  /** Receives the events of this service. An error that it throws is emitted as a `HoldfastWarning`, and has no other effect. */
  onEvent?: ((event: LockEvent) => void) | undefined
}

/** The fields of every event. */
export interface EventBase {
  /** The first of `names`. */
  readonly name: string
  readonly names: readonly string[]
}

/** A lease was granted. */
export interface AcquiredEvent extends EventBase {
  readonly type: 'acquired'
  readonly fencingToken: bigint
  /** The time from the call to the grant, in milliseconds. */
  readonly waitedMs: number
}

/** A lease was released by its holder. */
export interface ReleasedEvent extends EventBase {
  readonly type: 'released'
  readonly fencingToken: bigint
  /** The time from the grant to the end, in milliseconds. */
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
  /** The time from the grant to the end, in milliseconds. */
  readonly heldMs: number
  /** The reason, in one sentence. */
  readonly reason: string
}

/** A call found its name busy and waits. */
export interface WaitingEvent extends EventBase {
  readonly type: 'waiting'
}

/** An event of `onEvent`, distinguished by `type`. */
export type LockEvent = AcquiredEvent | ReleasedEvent | RenewedEvent | LostEvent | WaitingEvent

/** The state of a held lock. */
export interface LockInfo {
  readonly name: string
  /** The rest of the lease in milliseconds, by the store's clock; `Infinity` for another tool's lock that never expires. */
  readonly remainingMs: number
  /** The fencing token; `null` if another tool holds the name. */
  readonly fencingToken: bigint | null
  /** The process that holds the lock; `null` for another tool. `since`: the time of the grant by the store's clock. */
  readonly holder: { readonly host: string; readonly pid: number; readonly since: Date } | null
  /** The holder's `metadata`, or `null`. */
  readonly metadata: Json
}

/** Counters since `connect`. `held` and `waiting` are current numbers. */
export interface LockStats {
  /** Locks that are held now. */
  readonly held: number
  /** Calls that wait for a busy name now. */
  readonly waiting: number
  readonly acquired: number
  /** Calls that ended with the name busy. */
  readonly busy: number
  readonly released: number
  readonly renewed: number
  readonly lost: number
  /** Operations that failed or had no answer in time, including those that were retried. */
  readonly storeErrors: number
}

/** The result of `lock.toJSON()`, and the argument of `locks.restore()`. */
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
 * The error of every rejection of holdfast. One exception: an aborted wait rejects with `signal.reason` itself. `code` names
 * the case. `instanceof` narrows `code`; {@link isLockError} also accepts errors of another copy of this package.
 */
export declare class LockError extends Error {
  readonly name: 'LockError';
  readonly code: LockErrorCode;
  /** Whether the same call may succeed later, without a change. */
  readonly retryable: boolean;
  /** The (first) name of the lock, if the error concerns one. */
  readonly key?: string;
  /** The store (`redis`, `mongodb`, `sqlite`, …), if the error came from it. */
  readonly engine?: string;
  /** The error of the store's driver. For `using`: the value that `fn` threw, if the lock was lost as well. */
  readonly cause?: unknown;
  constructor(code: LockErrorCode, message: string, details?: {
    retryable?: boolean;
    key?: string | undefined;
    engine?: string | undefined;
    cause?: unknown;
  });
}
/**
 * Returns whether a value is a {@link LockError} of this or another copy of this package.
 *
 * @param code accepts only this code, and narrows the type to it
 */
export declare function isLockError<Code extends LockErrorCode = LockErrorCode>(value: unknown, code?: Code): value is LockError & {
  readonly code: Code;
};

/**
 * A held lock. Release it with `release()` or `await using`. A lock that is renewed and dropped without a release stays held
 * until the process ends or the service is closed. When such a lock is garbage collected, one `HoldfastWarning` names it.
 *
 * @example
 * await using lock = await locks.acquire('order:42', { ttlMs: 30_000 })
 */
export declare class Lock implements AsyncDisposable {
  private constructor();
  /** The (first) name. */
  get name(): string;
  /** All names in the order of the call, without duplicates. */
  get names(): string[];
  /** The owner token: 32 random hexadecimal digits, new for each acquisition and each `restore()`. */
  get token(): string;
  /**
   * The fencing token: larger than that of every earlier holder of the name. Store it with each write, and reject a write
   * with a smaller token than the stored one: a former holder, whose lease has ended, can then overwrite nothing.
   */
  get fencingToken(): bigint;
  /**
   * The rest of the lease in milliseconds, by the clock of this process; 0 after the release or loss. It ends earlier than in
   * the store: the ttl counts from the sending of the request, less 1 % and 2 ms.
   */
  get remainingMs(): number;
  /** Whether the lease is held: `remainingMs` is not 0. Computed at each read, so also right after the process was suspended. */
  get isHeld(): boolean;
  /** Aborts when the lease is lost, with a `LOCK_LOST` error as `reason`. A release does not abort it. */
  get signal(): Signal;
  /**
   * Extends the lease to at least `ttlMs` milliseconds from now on. Later renewals use this ttl as well. Never shortens the
   * lease.
   * @param ttlMs more than 0, at most 2147483648 (2^31) ms, or text with a unit
   * @throws `LOCK_LOST` when the lease is lost or was released, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  extend(ttlMs: Duration): Promise<void>;
  /**
   * Releases the lock. `isHeld` is `false` from the call on.
   * @returns `true`: this call released it. `false`: it was released before, or is lost
   * @throws `LOCK_STORE` when the store did not answer within `storeTimeoutMs`; the release is repeated in the background
   */
  release(): Promise<boolean>;
  /** Releases the lock like `release()`, but never rejects, so that it hides no error of the block. */
  [Symbol.asyncDispose](): Promise<void>;
  /**
   * Returns what another process needs to transfer the lock to itself with `locks.restore()`. The owner token in it is the
   * right to do that: treat it as a secret. It is valid for one `restore()`.
   */
  toJSON(): LockJson;
}

/**
 * A lock service over one store. Create one per process with `LockService.connect`. Its methods may be detached:
 * `const { acquire } = locks`.
 */
export declare class LockService implements AsyncDisposable {
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
  static connect(target?: Target | readonly Target[], options?: ConnectOptions): Promise<LockService>;
  static connect(options: ConnectOptions & {
    url?: Target | readonly Target[] | undefined;
  }): Promise<LockService>;
  private constructor();
  /**
   * The gist's `acquireLock`: makes one attempt. The lease is not renewed: it ends with its release or after the ttl. A name that
   * this service holds is busy for this service as well.
   * @param ttlSeconds in **seconds**, fractions allowed: more than 0, at most 2147483.648. Default: 30, or `defaults.ttlMs`
   * @returns `true`: this service holds the lock. `false`: the name is busy, or the lease ended before a blocked event loop
   * received it
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  acquireLock(name: string, ttlSeconds?: number): Promise<boolean>;
  /**
   * The gist's `releaseLock`: releases a lock that `acquireLock` of this service acquired, and never another holder's lock.
   * @returns `true`: this call released it. `false`: this service did not hold it (not acquired, expired, or transferred)
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  releaseLock(name: string): Promise<boolean>;
  /**
   * The gist's `acquireAndExecute`: makes one attempt, calls `fn` while it holds the lock, and releases the lock. The lease is
   * renewed only with `renew: true`; without it the lock expires after the ttl, also while `fn` runs.
   * @returns the result of `fn`; `undefined`, without a call of `fn`, if the name is busy
   * @throws the error of `fn`, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`; with `signal`: `signal.reason`
   */
  acquireAndExecute<T>(options: ExecuteOptions, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>;
  acquireAndExecute<T>(name: string, ttlSeconds: number | undefined, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>;
  acquireAndExecute<T>(name: string, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>;
  /**
   * Acquires a lock on one name, or on all of up to 1000 names at the same time, and waits while a name is busy.
   * @throws `LOCK_TIMEOUT` when a name is still busy after `waitMs`, `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`,
   * `LOCK_INVALID_ARGUMENT`
   */
  acquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock>;
  /**
   * Acquires a lock like `acquire`, but makes one attempt and does not wait.
   * @returns the lock; `null` if a name is busy
   * @throws `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  tryAcquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock | null>;
  /**
   * Acquires a lock like `acquire`, calls `fn` while it holds the lock, and releases the lock.
   * @returns the result of `fn`
   * @throws `LOCK_LOST` after the end of `fn` when the lease was lost while `fn` ran (`cause`: the error of `fn`, if it threw);
   * otherwise the error of `fn`; `LOCK_TIMEOUT`, `signal.reason`, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  using<T>(names: string | readonly string[], options: AcquireOptions | undefined, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>;
  using<T>(names: string | readonly string[], fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>;
  /**
   * Transfers a lock of another process or service to this service, from its `toJSON()` or the JSON text of that. The lock gets a
   * new owner token. From then on the former holder can neither extend nor release it. It finds its lock lost at its next
   * renewal or call, so transfer a lock only after its former holder has finished its work.
   * @throws `LOCK_LOST` when the lease has ended or was already transferred, `LOCK_STORE`, `LOCK_CLOSED`,
   * `LOCK_INVALID_ARGUMENT`
   */
  restore(json: LockJson | string): Promise<Lock>;
  /**
   * Reads the holder of a name.
   * @returns the state of the lock; `null` if the name is free
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  inspect(name: string): Promise<LockInfo | null>;
  /**
   * Lists the held locks whose name starts with `prefix`: literal text, not a pattern. Each page has `storeTimeoutMs`.
   * @returns the locks, sorted by the bytes of their names
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  list(options?: {
    prefix?: string | undefined;
  }): Promise<LockInfo[]>;
  /**
   * Releases a name, no matter which owner holds it. The holder loses the lock at its next renewal.
   * @returns `true`: the name was held and is free now. `false`: it was free
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   */
  forceRelease(name: string): Promise<boolean>;
  /** Returns the counters of this service. */
  stats(): LockStats;
  /**
   * Releases the held locks, ends waits with `LOCK_CLOSED`, and closes the connections. A lock that was held is lost to its
   * holder: its `signal` aborts with `LOCK_LOST`, and `using` rejects with it. Later calls reject with `LOCK_CLOSED`. Takes at
   * most `storeTimeoutMs`, or up to 1 s longer when the store does not answer. May be called again.
   */
  close(): Promise<void>;
  /** Closes the service like `close()`. */
  [Symbol.asyncDispose](): Promise<void>;
}
