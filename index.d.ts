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
 * - `LOCK_CLOSED`: the `LockService` is closed, or is closing.
 * - `LOCK_STORE`: the store failed, did not answer within `storeTimeoutMs`, or granted the lock after its lease had expired.
 */
export type LockErrorCode = 'LOCK_INVALID_ARGUMENT' | 'LOCK_TIMEOUT' | 'LOCK_LOST' | 'LOCK_CLOSED' | 'LOCK_STORE'

/** The options of `acquire`, `tryAcquire`, `using` and `tryUsing`. Durations are in milliseconds, or text with a unit. */
export interface AcquireOptions {
  /**
   * The duration of the lease from each grant and renewal: more than 0, at most 2147483648 (2^31) ms. More than 24 h, or less than
   * 100 ms with renewal, is probably in the wrong unit: it emits one `HoldfastWarning` (`HOLDFAST_TTL`). A hand-off grants a waiter at
   * most the first 4.5 s (MongoDB replica set, etcd, ZooKeeper: 2 s); a renewal extends the lease to `ttlMs` some 10 to 50 ms later, on MySQL
   * after the poll that reads the grant. ZooKeeper: half of `sessionTimeoutMs` at most, then a renewal.
   * @default 30000
   */
  ttlMs?: Duration | undefined
  /**
   * The longest time to wait for a busy name: 0 (one attempt) to `Infinity`. `tryAcquire` ignores it and does not wait.
   * The default of `tryUsing` is 0.
   * With a slow store the call may take longer: the store has at least 1 s to answer.
   * @default 10000
   */
  waitMs?: Duration | undefined
  /**
   * Whether a native thread renews the lease at a third of its ttl, also while the event loop is blocked. Leases that are
   * due at about the same time are renewed together, up to a tenth of that third earlier. With `false` the lease ends after `ttlMs`,
   * but the renewal after a hand-off still takes place: a process that ends before it leaves a lease of at most 4.5 s.
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
   * Renewal pauses while the event loop has not responded for this long: the locks of a process that hangs forever must expire.
   * More than 0, at most 2147483648 ms. Until the event loop has received the grant of a waiting call: `ttlMs` / 3.
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
   * What a call that waits does while the store cannot be reached or does not answer. `'fail'`: it rejects with `LOCK_STORE`
   * after `storeTimeoutMs`. `'wait'`: it tries again for `waitMs`, and then rejects with `LOCK_STORE`; after an
   * outage that is longer than `storeTimeoutMs`, the order of the waiters may be another one. Errors that no waiting ends, such as a
   * wrong password, reject at once in both cases.
   * @default 'fail'
   */
  onStoreError?: 'fail' | 'wait' | undefined
  /**
   * Stored with the lock while it is held; `inspect` and `list` return it. At most 16384 bytes of JSON.
   * @default none
   */
  metadata?: Json | object | undefined
}

/** The options of `acquireAndExecute`, as an object: those of `using`, with other defaults of `waitMs` and `renew`. */
export interface ExecuteOptions extends AcquireOptions {
  /** The name of the lock: 1 to 512 bytes of UTF-8. */
  name: string
  /**
   * The ttl of the lease in **seconds**, fractions allowed: more than 0, at most 2147483.648. Without `renew` the lock expires
   * after this time. `ttlMs` may be used instead.
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
}

/** The result of `tryUsing`: the result of `fn`, or the holder of the busy name, if `fn` was not called. */
export type Attempt<T> =
  { readonly ran: true; readonly value: T } | { readonly ran: false; readonly holder: Holder | null }

/**
 * The options of `oncePer`: those of `acquire` but `minHoldMs`, and the period. The `minHoldMs` and `maxHoldMs` of the service's `defaults` do
 * not apply.
 */
export interface OncePerOptions extends Omit<AcquireOptions, 'minHoldMs'> {
  /**
   * After a run that succeeded the name stays busy until this time has passed since its begin: more than 0, at most
   * 2147483648 (2^31) ms. Shorter than the interval of the schedule by at least the difference of the machines' clocks, or the next
   * run is skipped as well: for example 50 minutes for an hourly job.
   */
  periodMs: Duration
  /**
   * The longest time to wait for a busy name: 0 (one attempt) to `Infinity`. A call that waits runs the job in the place of an instance
   * that fails, and again if it waits beyond the end of the period. After a run that succeeded it returns `ran: false` at its end.
   * @default 1000, at most half of `periodMs`
   */
  waitMs?: Duration | undefined
}

/** The options of `watch`. */
export interface WatchOptions {
  /**
   * The time between two reads. The name is also read when its lease ends. All iterations of a name in a service share the reads, with
   * their shortest interval. More than 0, at most 2147483648 ms.
   * @default 1000
   */
  intervalMs?: Duration | undefined
  /** Ends the iteration: it throws `signal.reason`. */
  signal?: SignalLike | undefined
}

/** TLS settings: PEM as text, or paths of PEM files, which are read for each connection. */
export interface TlsOptions {
  /** The certificate authorities to trust, as PEM text, instead of the system's (MongoDB: Mozilla's); on MySQL and MariaDB beside them. */
  ca?: string | undefined
  /** The path of the file with `ca`. */
  caFile?: string | undefined
  /** The client's certificate, as PEM text. */
  cert?: string | undefined
  /** The path of the file with `cert`. */
  certFile?: string | undefined
  /** The client's private key, as PEM text. Without it, the key is expected together with the certificate. */
  key?: string | undefined
  /** The path of the file with `key`. */
  keyFile?: string | undefined
  /**
   * The host name in the certificate of the server, if it is not the host of the URL (Redis). Sentinels are expected to have it as well.
   * @default the host of the URL
   */
  servername?: string | undefined
  /**
   * Accepts any certificate. For tests only.
   * @default false
   */
  insecure?: boolean | undefined
}

/** The login of a new connection. */
export interface Login {
  /**
   * The user name.
   * @default on Redis the user `default`; on PostgreSQL that of `PGUSER`, or the operating system's user of the process
   */
  username?: string | undefined
  password: string
}

/** The defaults of a service for options that a call does not set. */
export type Defaults = Pick<
  AcquireOptions,
  'ttlMs' | 'waitMs' | 'renew' | 'maxHoldMs' | 'stallLimitMs' | 'minHoldMs' | 'onStoreError'
>

/** The options of `LockService.connect`. */
export interface ConnectOptions {
  /** The host name or IP address of one Redis node, instead of a URL. With `tls` the connection uses TLS. */
  host?: string | undefined
  /**
   * The port of `host`.
   * @default 6379
   */
  port?: number | undefined
  /**
   * The number of the database of `host`.
   * @default 0
   */
  database?: number | undefined
  /** The user name for Redis, MongoDB, PostgreSQL, MySQL, etcd or ZooKeeper. The URL must not have a login then. */
  username?: string | undefined
  /**
   * The password for Redis, MongoDB, PostgreSQL, MySQL, etcd or ZooKeeper, not percent-encoded; for Redis and PostgreSQL also a function
   * that returns it, which is called like `credentials`. The URL may have the user name.
   */
  password?: string | (() => string | Promise<string>) | undefined
  /**
   * Returns the login for a new connection to Redis or PostgreSQL, for passwords that rotate and tokens that expire. It is called before
   * every new connection, also after a server refused a login. If it has no answer within half of `storeTimeoutMs`, for example because
   * the event loop is blocked, the connection uses the last login. An error of it is a retryable `LOCK_STORE`. It does not keep the
   * process alive.
   */
  credentials?: (() => Login | Promise<Login>) | undefined
  /**
   * PostgreSQL behind a pooler: the URL of the server itself, for the connection that receives the notifications of waiters. Without it,
   * waiters behind a pooler poll. What it leaves out (user, password, database) is that of the other URL.
   */
  listenUrl?: Target | undefined
  /**
   * How long `connect` tries again while the store cannot be reached or does not answer, in milliseconds: 0 to 2147483648 ms. For
   * services that start together with their store.
   * @default 0
   */
  connectMs?: Duration | undefined
  /**
   * Connect at the first call instead of in `connect`. If that fails, also because of an invalid URL, the call rejects, and the next
   * call tries again. With `onStoreError: 'wait'` the call tries again itself for `waitMs`. An attempt to connect counts towards
   * `waitMs` only if it fails.
   * @default false
   */
  lazy?: boolean | undefined
  /**
   * The prefix of every name in the store: at most 512 bytes, may be empty.
   * @default 'lock:' on Redis, 'holdfast/' on etcd, '' elsewhere
   */
  keyPrefix?: string | undefined
  /**
   * The collection in MongoDB. Other stores reject it, except `memory:`.
   * @default 'locks'
   */
  collection?: string | undefined
  /**
   * The table in SQLite, PostgreSQL and MySQL, and the beginning of the names of its other tables: 1 to 51 letters, digits and
   * underscores, not starting with a digit (SQLite: or with `sqlite_`). PostgreSQL and MySQL also take `schema.table`. Default
   * schema: `holdfast` on PostgreSQL, the database of the URL on MySQL. Other stores reject it, except `memory:`.
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
   * PostgreSQL, MySQL, MariaDB: the largest number of connections, besides one for each cancellation. 1 to 100. With 1, waiters poll
   * on PostgreSQL, too. Other stores reject it, except `memory:`.
   * @default 5 on PostgreSQL, 4 on MySQL and MariaDB
   */
  maxConnections?: number | undefined
  /**
   * ZooKeeper: how long the locks of a process that died stay busy; half of it is the longest lease without a renewal. The server limits
   * it, by default to 4 to 40 s.
   * @default 10000
   */
  sessionTimeoutMs?: Duration | undefined
  /**
   * Defaults for the calls of this service. They also apply to the gist's functions, except for `waitMs` and `renew`: those
   * functions make one attempt, and their leases are not renewed.
   */
  defaults?: Defaults | undefined
  /** TLS settings. Rejected with a URL that has no TLS: `redis://`, `sslmode=disable`, `ssl-mode=DISABLED`, `sqlite:`. */
  tls?: TlsOptions | undefined
  /** Receives the events, in the `AsyncLocalStorage` context of `connect`. An error that it throws becomes a `HoldfastWarning`. */
  onEvent?: ((event: LockEvent) => void) | undefined
}

/** The fields of the events of a lock. `JSON.stringify` of an event writes the fencing token as decimal text. */
export interface EventBase {
  /** The kind of the store: `redis`, `redis quorum`, `mongodb`, `sqlite`, … */
  readonly engine: string
  /** The first of `names`. */
  readonly name: string
  readonly names: readonly string[]
  /** The share of the call or the lease, if the name is that of a semaphore or a read/write lock. Absent for a lock. */
  readonly share?: Share
}

/** A number of permits, and the limit of the call. A reader has 1 permit, a writer 1048576; the limit of both is 1048576. */
export interface Share {
  readonly permits: number
  readonly limit: number
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

/** A call ended because its name was busy, at once or after its wait. */
export interface TimeoutEvent extends EventBase {
  readonly type: 'timeout'
  /** The time from the call to its end, in milliseconds. */
  readonly waitedMs: number
}

/** The caller's signal ended a call. */
export interface AbortedEvent extends EventBase {
  readonly type: 'aborted'
  /** The time from the call to its end, in milliseconds. */
  readonly waitedMs: number
}

/** A call that acquires a lock ended with an error. */
export interface FailedEvent extends EventBase {
  readonly type: 'failed'
  /** The time from the call to its end, in milliseconds. */
  readonly waitedMs: number
  /** The code of the error. */
  readonly code: 'LOCK_STORE' | 'LOCK_CLOSED'
  /** The message of the error. */
  readonly reason: string
}

/** The store answers again, after `disconnected`. */
export interface ConnectedEvent {
  readonly type: 'connected'
  readonly engine: string
  readonly name?: undefined
  readonly names?: undefined
}

/** An operation of the store failed or had no answer in time, after one that succeeded. */
export interface DisconnectedEvent {
  readonly type: 'disconnected'
  readonly engine: string
  readonly name?: undefined
  readonly names?: undefined
  /** The error of the store. */
  readonly reason: string
}

/** An event of `onEvent` and of the channel `holdfast:TYPE`, distinguished by `type`. */
export type LockEvent =
  | AcquiredEvent
  | ReleasedEvent
  | RenewedEvent
  | LostEvent
  | WaitingEvent
  | TimeoutEvent
  | AbortedEvent
  | FailedEvent
  | ConnectedEvent
  | DisconnectedEvent

/** The process that holds a lock. */
export interface Holder {
  readonly host: string
  readonly pid: number
  /** The time of the grant, by the store's clock (etcd: that of the holder). */
  readonly since: Date
}

/** The state of a held lock. `JSON.stringify` writes the fencing token as decimal text. */
export interface LockInfo {
  readonly name: string
  /** The rest of the lease in milliseconds (etcd, ZooKeeper: its ttl). `Infinity` for another tool's lock that never expires. */
  readonly remainingMs: number
  /**
   * The fencing token; `null` if another tool holds the name. A holder writes it after the grant, on a MongoDB replica set after 50 to
   * 100 ms, on Redis after up to 50 ms, and `inspect` waits that long; `null` if the holder died before or could not. On a standalone
   * MongoDB also `null` for a lock that `acquireLock` acquired, unless its service has `onEvent`.
   */
  readonly fencingToken: bigint | null
  /** The process that holds the lock; `null` for another tool, and on Redis where the token is `null`: the holder may have died. */
  readonly holder: Holder | null
  /** The holder's `metadata`, or `null`. */
  readonly metadata: Json
  /**
   * The number of calls in the queue of the name, of all processes; a call for several names waits for one of them at a time. `null` on a
   * quorum and on a standalone MongoDB, which have no queue. Calls of a process that died count for 5 s; on Redis, while other processes
   * wait, until a release skips them.
   */
  readonly waiting: number | null
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

/** The result of `lock.toJSON()`, for logs. It has no owner token: `lock.transferable()` returns that. */
export interface LockJson {
  readonly name: string
  readonly names: readonly string[]
  /** The fencing token in decimal digits: JSON has no bigint. */
  readonly fencingToken: string
  readonly isHeld: boolean
  readonly remainingMs: number
}

/** The result of `lock.transferable()`, and the argument of `locks.restore()`. */
export interface TransferableLock {
  readonly names: readonly string[]
  /** The owner token, the right to the lock: treat it as a secret. */
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
  /** The name of the lock, if the error concerns one: for `LOCK_TIMEOUT` the busy one of several names, otherwise the first. */
  readonly key?: string;
  /** The store (`redis`, `mongodb`, `sqlite`, …), if the error came from it. */
  readonly engine?: string;
  /**
   * For `LOCK_TIMEOUT`: the process that holds `key`; of several the one whose lease ends first. `null` if another tool holds it, it
   * became free meanwhile, or the store did not answer at once.
   */
  readonly holder?: Holder | null;
  /** For `LOCK_TIMEOUT`: the rest of the holder's lease in milliseconds; `null` if it is not known. */
  readonly remainingMs?: number | null;
  /** The error of the store's driver. For `using`: the value that `fn` threw, if the lock was lost as well. */
  readonly cause?: unknown;
  constructor(code: LockErrorCode, message: string, details?: {
    retryable?: boolean;
    key?: string | undefined;
    engine?: string | undefined;
    cause?: unknown;
    holder?: Holder | null;
    remainingMs?: number | null;
  });
}
/**
 * Returns whether a value is a {@link LockError} of this or another copy of this package.
 *
 * @param code accepts only this code, and narrows the type to it
 */
export declare function isLockError<Code extends LockErrorCode = LockErrorCode>(value: unknown, code?: Code): value is LockError & {
  readonly code: Code;
} & ([Code] extends ['LOCK_TIMEOUT'] ? {
  readonly holder: Holder | null;
  readonly remainingMs: number | null;
} : unknown);

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
  /**
   * The number of permits: of a semaphore those of the call, of a lock and of a reader 1, of a writer 1048576. 0 for a job that runs without
   * a permit (`onStoreError: 'run'`).
   */
  get permits(): number;
  /** The owner token: 32 random hexadecimal digits, new for each acquisition and each `restore()`. */
  get token(): string;
  /**
   * The fencing token: larger than that of every earlier grant of the name. Store it with each write, and reject a write
   * with a smaller token than the stored one: a former holder, whose lease has ended, can then overwrite nothing. Of a
   * semaphore it only identifies the grant; of a read/write lock store the token of writers only.
   */
  get fencingToken(): bigint;
  /**
   * The rest of the lease in milliseconds, by the clock of this process; 0 after the release or loss. It ends earlier than in the
   * store: the ttl counts from the sending of the request, less 1 % and 2 ms. For some 10 to 50 ms after a wait it is at most 4500
   * (MongoDB replica set, etcd, ZooKeeper: 2000), until a renewal extends the lease to its ttl. `extend()` waits for that renewal.
   */
  get remainingMs(): number;
  /** Whether the lease is held: `remainingMs` is not 0. Computed at each read, so also right after the process was suspended. */
  get isHeld(): boolean;
  /**
   * Aborts when the lease is lost, with a `LOCK_LOST` error as `reason`. A release does not abort it. Its listeners run in the
   * `AsyncLocalStorage` context in which it was first read.
   */
  get signal(): Signal;
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
  extend(ttlMs: Duration): Promise<void>;
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
  release(): Promise<boolean>;
  /**
   * Releases the lock like `release()`, but never rejects, so that it hides no error of the block.
   *
   * @example
   * await using lock = await locks.acquire('order:42')
   */
  [Symbol.asyncDispose](): Promise<void>;
  /**
   * Returns what another process needs to transfer the lock to itself with `locks.restore()`. The owner token in it is the
   * right to do that: treat it as a secret. It is valid for one `restore()`.
   * @throws `LOCK_INVALID_ARGUMENT` for a permit of a semaphore and for a side of a read/write lock, which cannot be transferred
   *
   * @example
   * channel.send(JSON.stringify(lock.transferable())) // there: await locks.restore(text)
   */
  transferable(): TransferableLock;
  /**
   * Returns what `JSON.stringify` shows, for logs: never the owner token. {@link transferable} returns it.
   *
   * @example
   * console.log(JSON.stringify({ message: 'acquired', lock }))
   */
  toJSON(): LockJson;
}

/** The options of the calls of a semaphore: those of `acquire`, and the number of permits. `minHoldMs` keeps the permits in use. */
export interface PermitOptions extends AcquireOptions {
  /**
   * The number of permits, which are acquired and released together: a whole number from 1 to the limit of the semaphore.
   * @default 1
   */
  permits?: number | undefined;
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
  onStoreError?: 'fail' | 'wait' | 'run' | undefined;
}
/** A holder of a semaphore or a read/write lock: what `LockInfo` has but `waiting`, and its share. */
export interface PermitInfo extends Omit<LockInfo, 'waiting'> {
  /** The permits that it has in use: of a reader 1, of a writer 1048576. */
  readonly permits: number;
  /** The limit of the call that acquired it; of a reader and a writer 1048576. */
  readonly limit: number;
}
/** The state of a semaphore or a read/write lock. */
export interface SharedInfo {
  readonly name: string;
  /** The permits in use. */
  readonly used: number;
  /** The smallest limit of the holders; `null` without holders. Of a read/write lock: 1048576. */
  readonly limit: number | null;
  /** The number of calls in the queue of the name, of all processes; 0 without holders, and while the slot of a Redis Cluster moves. */
  readonly waiting: number;
  /** The holders, in the order of their grants. */
  readonly holders: readonly PermitInfo[];
}
/** The calls of a `LockService` on one fixed name: those of a semaphore, or of one side of a read/write lock. They may be detached. */
export interface NamedLock<O = AcquireOptions, U = O> {
  readonly name: string;
  /**
   * Acquires like `LockService.acquire`, and waits in the queue of the name: strictly first come, first served.
   * @throws as `LockService.acquire`; `LOCK_INVALID_ARGUMENT` on a Redis quorum, and on a standalone or sharded MongoDB
   */
  acquire(options?: O): Promise<Lock>;
  /**
   * Acquires like `LockService.tryAcquire`: one attempt, which never overtakes a call that waits. Resolves to `null` if it is not granted.
   * @throws as `acquire`, without `LOCK_TIMEOUT`
   */
  tryAcquire(options?: O): Promise<Lock | null>;
  /**
   * Acquires like `acquire`, calls `fn`, and releases, like `LockService.using`.
   * @throws as `LockService.using`
   */
  using<T>(options: U | undefined, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>;
  using<T>(fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>;
  /**
   * Calls `fn` like `LockService.tryUsing`. `holder` is the holder whose lease ends first.
   * @throws as `using`, without `LOCK_TIMEOUT`
   */
  tryUsing<T>(options: O | undefined, fn: (lock: Lock) => T | PromiseLike<T>): Promise<Attempt<T>>;
  tryUsing<T>(fn: (lock: Lock) => T | PromiseLike<T>): Promise<Attempt<T>>;
}
/**
 * A limit on concurrency over all processes: at most `limit` permits are in use. It has no state: create one for each call, or keep one.
 * `LockService.semaphore` returns it.
 */
export interface Semaphore extends NamedLock<PermitOptions, PermitUsingOptions> {
  readonly limit: number;
  /**
   * Reads the holders of permits.
   * @throws `LOCK_STORE`, `LOCK_CLOSED`; `LOCK_INVALID_ARGUMENT` where the store has no semaphores
   */
  inspect(): Promise<SharedInfo>;
  /**
   * Releases the permits of all holders. They lose them at their next renewal. Resolves to whether there were any.
   * @throws `LOCK_STORE`, `LOCK_CLOSED`; `LOCK_INVALID_ARGUMENT` where the store has no semaphores
   */
  forceRelease(): Promise<boolean>;
}
/** A read/write lock: many readers, or one writer. It has no state. `LockService.readWriteLock` returns it. */
export interface ReadWriteLock {
  readonly name: string;
  /** The read side: readers hold it at the same time. A reader that comes after a waiting writer waits behind it. */
  readonly read: NamedLock;
  /** The write side: its holder is the only one. A reader cannot become a writer: release, acquire, and check the state again. */
  readonly write: NamedLock;
  /**
   * Reads the holders: readers, or one writer.
   * @throws `LOCK_STORE`, `LOCK_CLOSED`; `LOCK_INVALID_ARGUMENT` where the store has no semaphores
   */
  inspect(): Promise<SharedInfo>;
  /**
   * Releases the name of all holders. They lose it at their next renewal. Resolves to whether there were any.
   * @throws `LOCK_STORE`, `LOCK_CLOSED`; `LOCK_INVALID_ARGUMENT` where the store has no semaphores
   */
  forceRelease(): Promise<boolean>;
}

/** The options of `elect`. The `minHoldMs` and `maxHoldMs` of the service's `defaults` do not apply. */
export interface ElectOptions extends Pick<AcquireOptions, 'ttlMs' | 'stallLimitMs' | 'metadata'> {
  /**
   * The number of candidates that lead at the same time: a whole number from 1 to 1048576. All candidates of a name set the same one; while
   * they differ, the smallest one of the call and of all leaders applies. With 1 a leader holds the lock of the name, with more a permit of
   * the semaphore of the name: candidates of the two kinds do not exclude each other. With more than 1 `term` identifies the leadership,
   * but cannot refuse an earlier leader, because several lead at the same time; and the stores are those of `LockService.semaphore`.
   * @default 1
   */
  maxLeaders?: number | undefined;
  /** Ends the election like `stop()`. */
  signal?: SignalLike | undefined;
  /**
   * What follows an error of `fn`, and a store error that is not retryable, such as a wrong password. `false`: the election ends,
   * and `done` rejects with the error. `true`: this candidate waits for the leadership again, after a pause of 100 ms that
   * doubles up to 30 s, until a leadership lasts a minute. The pause also follows a return of `fn`, and a leadership below 1 s.
   * @default false
   */
  restart?: boolean | undefined;
  /**
   * With `restart`: receives these errors (of store errors the first until the next leadership). If it throws, the election ends.
   * @default a `HoldfastWarning` (`HOLDFAST_ELECTION`) with the error
   */
  onError?: ((error: unknown) => void) | undefined;
  /**
   * Lets the process exit while this is the only thing that it waits for. The attempt of a `lazy` service to connect keeps the process
   * alive, for at most `storeTimeoutMs`.
   * @default false
   */
  unref?: boolean | undefined;
}
/** The leadership that `fn` of `elect` gets. */
export interface Leadership {
  readonly name: string;
  /** The fencing token: larger than that of every earlier leader. With one leader, pass it to what must refuse an earlier leader. */
  readonly term: bigint;
  /** Aborts when the leadership ends: after a loss with a `LOCK_LOST` error, after `resign()` and `stop()` with an `AbortError`. */
  readonly signal: Signal;
  /** Whether this leadership lasts, computed at each read by the native clock. */
  readonly isLeader: boolean;
  /** The rest of the lease in milliseconds, by the clock of this process. */
  readonly remainingMs: number;
}
/**
 * A candidate for the leadership of a name, from `locks.elect()`. It waits in the queue of the name until it leads.
 *
 * @example
 * const election = locks.elect('scheduler', { ttlMs: '10s' }, ({ signal }) => runScheduler(signal))
 * console.log(election.isLeader, election.term)
 * await election.stop()
 */
export declare class Election implements AsyncDisposable {
  private constructor();
  /**
   * Resolves when the election has ended: after `stop()`, an abort of the option `signal`, or `close()` of the service, when `fn`
   * has settled and the lock is released. Rejects with `LOCK_CLOSED` if the service was closed before; without `restart`, with
   * what `fn` threw, and with a `LOCK_STORE` that is not retryable, such as a wrong password. If `done` was not read before that,
   * the error is emitted as a `HoldfastWarning` (`HOLDFAST_ELECTION`). The rejection never ends the process by itself.
   */
  get done(): Promise<void>;
  /** Whether this candidate leads now, by the native clock. `false` from `resign()`, `stop()` and a loss on. */
  get isLeader(): boolean;
  /** The fencing token of the current leadership: larger than that of every earlier leader. `null` while this candidate waits. */
  get term(): bigint | null;
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
  resign(): Promise<void>;
  /**
   * Ends the election: like {@link resign}, but does not lead again. Resolves when `fn` has settled and the lock is released, and
   * never rejects: {@link done} does. Do not await it in `fn`.
   *
   * @example
   * const election = locks.elect('scheduler', ({ signal }) => runScheduler(signal))
   * process.once('SIGTERM', () => election.stop())
   * await election.stop()
   */
  stop(): Promise<void>;
  /**
   * Ends the election like {@link stop}.
   *
   * @example
   * await using election = locks.elect('scheduler', ({ signal }) => runScheduler(signal))
   */
  [Symbol.asyncDispose](): Promise<void>;
}

/**
 * A lock service over one store. Create one per process with `LockService.connect`. Its methods may be detached:
 * `const { acquire } = locks`.
 */
export declare class LockService implements AsyncDisposable {
  /**
   * Connects to a store, and contacts it once before the promise resolves. Rejects after `storeTimeoutMs` (5 s by default), with
   * `connectMs` later. With `lazy` it resolves at once, and the first call connects.
   *
   * | target | store |
   * |---|---|
   * | none | `HOLDFAST_URL` in the environment if set, otherwise a SQLite file of this machine in the user's state folder: for development |
   * | `memory:` or `memory:NAME` | this process only, for unit tests |
   * | `sqlite:PATH` | every process on this machine |
   * | `redis://`, `rediss://` (TLS), `redis+unix:///PATH` (a socket) | Redis 6.2 or later, one node |
   * | `redis+sentinel://h1,h2,h3/MASTER`, `rediss+sentinel://…` | the Redis master of that name, which its sentinels report |
   * | `redis+cluster://h1,h2,h3`, `rediss+cluster://…` | Redis Cluster 7.0 or later |
   * | a list of three or more `redis://` or `rediss://` | a quorum of independent Redis nodes: a lock is held if a majority of them has it |
   * | `mongodb://`, `mongodb+srv://` | MongoDB 5.0 or later: standalone or replica set |
   * | `postgres://h1,h2/DATABASE`, `postgresql://…` | PostgreSQL 12 or later: of several servers the one that accepts writes |
   * | `mysql://`, `mariadb://` | MariaDB 10.6 or later; MySQL 8.0 or later (tests of the contract and of logins run on 9.7; 8 was not tried) |
   * | `etcd://h1,h2`, `etcds://` | etcd 3.4 or later |
   * | `zookeeper://h1,h2/folder`, `zookeepers://` | ZooKeeper 3.6 or later |
   *
   * `valkey` may replace `redis` in a URL. `{ host, port, database }` is one Redis node without a URL.
   *
   * A target that is present but `undefined`, `null` or empty is rejected, and so is an empty `HOLDFAST_URL`: probably a setting
   * is missing. With `NODE_ENV=production` the embedded store emits one `HoldfastWarning` (`HOLDFAST_EMBEDDED_STORE`).
   *
   * @throws `LOCK_STORE` when the store cannot be reached within `storeTimeoutMs` or rejects the connection,
   * `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const locks = await LockService.connect('redis://127.0.0.1:6379', { defaults: { ttlMs: '1m' } })
   */
  static connect(): Promise<LockService>;
  static connect(target: Target | readonly Target[], options?: ConnectOptions): Promise<LockService>;
  static connect(options: ConnectOptions & {
    url?: Target | readonly Target[];
  }): Promise<LockService>;
  private constructor();
  /**
   * The gist's `acquireLock`: makes one attempt. The lease is not renewed: it ends with its release or after the ttl. A name that
   * this service holds is busy for this service as well.
   * @param ttlSeconds in **seconds**, fractions allowed: more than 0, at most 2147483.648. Default: 30, or `defaults.ttlMs`
   * @returns `true`: this service holds the lock. `false`: the name is busy, or the lease ended before a blocked event loop
   * received it
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * if (await locks.acquireLock('report', 60)) {
   *   await sendReport().finally(() => locks.releaseLock('report'))
   * }
   */
  acquireLock(name: string, ttlSeconds?: number): Promise<boolean>;
  /**
   * The gist's `releaseLock`: releases a lock that `acquireLock` of this service acquired, and never another holder's lock.
   * @returns `true`: this call released it, with the exceptions of `Lock.release`. `false`: this service did not hold it (not
   * acquired, expired, or transferred)
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * if (!(await locks.releaseLock('report'))) console.log('the lease had ended')
   */
  releaseLock(name: string): Promise<boolean>;
  /**
   * The gist's `acquireAndExecute`: makes one attempt, calls `fn` while it holds the lock, and releases the lock. The lease is
   * renewed only with `renew: true`; without it the lock expires after the ttl, also while `fn` runs. The process does not exit by
   * itself while `fn` runs.
   * @returns the result of `fn`; `undefined`, without a call of `fn`, if the name is busy
   * @throws the error of `fn`, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`; with `signal`: `signal.reason`
   *
   * @example
   * await locks.acquireAndExecute({ name: 'report', ttlSeconds: 60, minHoldMs: '30s' }, () => sendReport())
   */
  acquireAndExecute<T>(options: ExecuteOptions, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>;
  acquireAndExecute<T>(name: string, ttlSeconds: number | undefined, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>;
  acquireAndExecute<T>(name: string, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>;
  /**
   * Acquires a lock on one name, or on all of up to 1000 names (etcd, ZooKeeper: 60) at the same time, and waits while a name is busy.
   * Meanwhile the names before it in sort order are busy for other calls. In a Redis Cluster these are the names of earlier slots. On
   * MongoDB and a quorum no names are reserved.
   * @throws `LOCK_TIMEOUT` when a name is still busy after `waitMs`, `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`,
   * `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const lock = await locks.acquire(['account:1', 'account:2'], { waitMs: '5s' })
   * await sendReport().finally(() => lock.release())
   */
  acquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock>;
  /**
   * Acquires a lock like `acquire`, but makes one attempt and does not wait.
   * @returns the lock; `null` if a name is busy
   * @throws `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const lock = await locks.tryAcquire('report')
   * console.log(lock ? 'acquired' : 'busy')
   * await lock?.release()
   */
  tryAcquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock | null>;
  /**
   * Acquires a lock like `acquire`, calls `fn` while it holds the lock, and releases the lock. The process does not exit by itself
   * while `fn` runs.
   * @returns the result of `fn`
   * @throws `LOCK_LOST` after the end of `fn` when the lease was lost while `fn` ran (`cause`: the error of `fn`, if it threw);
   * otherwise the error of `fn`; `LOCK_TIMEOUT`, `signal.reason`, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const receipt = await locks.using('order:42', { waitMs: '5s' }, async (lock) => {
   *   return charge('order:42', { signal: lock.signal, fencingToken: lock.fencingToken })
   * })
   */
  using<T>(names: string | readonly string[], options: AcquireOptions | undefined, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>;
  using<T>(names: string | readonly string[], fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>;
  /**
   * Calls `fn` like `using` if the name is free. Otherwise returns the holder: another process does the job already. Makes one
   * attempt; with `waitMs` it waits that long.
   * @returns `{ ran: true, value }` with the result of `fn`; `{ ran: false, holder }`, without a call of `fn`, if a name is busy
   * @throws as `using`, without `LOCK_TIMEOUT`
   *
   * @example
   * const attempt = await locks.tryUsing('report', () => createReport())
   * if (!attempt.ran) console.log('skipped: running on', attempt.holder?.host)
   */
  tryUsing<T>(names: string | readonly string[], options: AcquireOptions | undefined, fn: (lock: Lock) => T | PromiseLike<T>): Promise<Attempt<T>>;
  tryUsing<T>(names: string | readonly string[], fn: (lock: Lock) => T | PromiseLike<T>): Promise<Attempt<T>>;
  /**
   * Calls `fn` once per period, in the process that calls first: for jobs of a schedule that runs in every instance. Calls `fn` like
   * `tryUsing`, but waits for a busy name for 1 s, at most half of the period. When `fn` returns, the name stays busy for the rest of
   * `periodMs`. When it throws, the name is free at once, and a call that waits, or the next one, runs the job. When the store does not
   * answer at the end of the job, the call resolves, and the end is repeated in the background for 5 minutes, or for the ttl if that is
   * longer. Until that succeeds, the name is free after the end of the lease.
   * @returns as `tryUsing`; `holder` is the process that runs the job or ran it, or `null` where the store does not know it
   * @throws as `tryUsing`
   *
   * @example
   * await locks.oncePer('report', { periodMs: '50m' }, () => sendReport())
   */
  oncePer<T>(name: string, options: OncePerOptions, fn: (lock: Lock) => T | PromiseLike<T>): Promise<Attempt<T>>;
  /**
   * Takes part in the election of a leader. Waits in the queue of the name, without a limit and through outages of the store, calls `fn`
   * while this process leads, and waits again when `fn` has settled. `fn` should run until its `signal` aborts. A leader that ignores
   * the signal runs at the same time as its successor; a resource that refuses smaller values of `term` is safe. `close({ drainMs })`
   * ends the election, and the next candidate leads as soon as `fn` has settled. With `maxLeaders` several candidates lead at the same
   * time.
   * @throws `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const election = locks.elect('scheduler', { ttlMs: '10s' }, async ({ signal, term }) => {
   *   while (!signal.aborted) await runNextTask({ signal, fencingToken: term })
   * })
   * await election.stop()
   */
  elect(name: string, options: ElectOptions | undefined, fn: (leadership: Leadership) => unknown): Election;
  elect(name: string, fn: (leadership: Leadership) => unknown): Election;
  /**
   * Returns a semaphore: at most `limit` permits of the name are in use at the same time, in all processes. Sends nothing to the store.
   * A call is granted while the permits in use and its own are at most the smallest limit of the call and of all holders. The name is
   * another one than that of a lock with the same text, and the same one as that of a read/write lock. Not on a Redis quorum, a
   * standalone MongoDB and a sharded cluster of MongoDB: its calls reject there.
   * @param limit a whole number from 1 to 1048576
   * @throws `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const reports = locks.semaphore('reports', 5)
   * await reports.using({ waitMs: '1m' }, () => createReport())
   */
  semaphore(name: string, limit: number): Semaphore;
  /**
   * Returns a read/write lock: many readers, or one writer. Sends nothing to the store. First come, first served: a reader that comes
   * after a waiting writer waits behind it. For the name and the stores see `semaphore`.
   * @throws `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const { read, write } = locks.readWriteLock('catalog')
   * await read.using(() => createReport())
   * await write.using({ waitMs: '1m' }, () => sendReport())
   */
  readWriteLock(name: string): ReadWriteLock;
  /**
   * Watches the holder of a name: yields the state at first, and after each change of the holder. Reads the name once per `intervalMs`,
   * and only while `next()` waits; holders in between are not seen. Outages of the store are no change, and neither
   * is another number of waiting calls. Ends when the service is closed.
   * @throws while it is iterated: `signal.reason` after an abort, `LOCK_STORE` if it is not retryable; at the call:
   * `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * for await (const leader of locks.watch('scheduler')) {
   *   console.log('leader:', leader?.holder?.host ?? 'none')
   *   if (leader === null) break
   * }
   */
  watch(name: string, options?: WatchOptions): AsyncIterableIterator<LockInfo | null>;
  /**
   * Transfers a lock of another process or service to this service, from its `transferable()` or the JSON text of that. The lock
   * gets a new owner token. From then on the former holder can neither extend nor release it. It finds its lock lost at its next
   * renewal or call, so transfer a lock only after its former holder has finished its work.
   * @throws `LOCK_LOST` when the lease has ended or was already transferred, `LOCK_STORE`, `LOCK_CLOSED`,
   * `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const text = JSON.stringify(lock.transferable()) // in the other process
   * const mine = await locks.restore(text)
   * await mine.release()
   */
  restore(transferable: TransferableLock | string): Promise<Lock>;
  /**
   * Reads the holder of a name.
   * @returns the state of the lock; `null` if the name is free
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const info = await locks.inspect('order:42')
   * console.log(info ? `held by process ${info.holder?.pid}` : 'free')
   */
  inspect(name: string): Promise<LockInfo | null>;
  /**
   * Lists the held locks whose name starts with `prefix`: literal text, not a pattern. Semaphores and read/write locks are not listed.
   * Each page has `storeTimeoutMs`. The event loop runs between pages.
   * @returns the locks, sorted by the bytes of their names. Await the result for an array, or iterate over it with `for await`
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const orders = await locks.list({ prefix: 'order:' })
   * for await (const { name, remainingMs } of locks.list()) console.log(name, remainingMs)
   */
  list(options?: {
    prefix?: string | undefined;
  }): Promise<LockInfo[]> & AsyncIterable<LockInfo>;
  /**
   * Releases a name, no matter which owner holds it. The holder loses the lock at its next renewal.
   * @returns `true`: the name was held and is free now. `false`: it was free
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * console.log((await locks.forceRelease('order:42')) ? 'released' : 'it was free')
   */
  forceRelease(name: string): Promise<boolean>;
  /**
   * Makes one round trip to the store, for a health check.
   * @returns its duration in milliseconds
   * @throws `LOCK_STORE` when the store does not answer within `storeTimeoutMs`, `LOCK_CLOSED`
   *
   * @example
   * console.log(`the store answers in ${await locks.ping()} ms`)
   */
  ping(): Promise<number>;
  /**
   * Returns a view of this service: a `LockService` on the same connections whose names begin with `prefix` in the store, after
   * `keyPrefix`. Results and errors of the view have the names without it; a name and the prefix have at most 512 bytes together.
   * `onEvent` receives the whole names. Counters are those of the service, and `close()` closes the service.
   *
   * @example
   * const billing = locks.withPrefix('billing:')
   * await billing.using('invoice:7', sendInvoice) // the lock "billing:invoice:7"
   *
   * @throws `LOCK_INVALID_ARGUMENT`
   */
  withPrefix(prefix: string): LockService;
  /**
   * Returns the counters of this service.
   *
   * @example
   * console.log(locks.stats().waiting)
   */
  stats(): LockStats;
  /**
   * Releases the held locks, ends waits with `LOCK_CLOSED`, and closes the connections. A lock that was held is lost to its
   * holder: its `signal` aborts with `LOCK_LOST`, and `using` rejects with it. The abort comes before the release in the store,
   * and before the promise resolves. Later calls reject with `LOCK_CLOSED`. Takes at most `storeTimeoutMs`, or up to 1 s longer
   * when the store does not answer or the event loop is blocked. May be called again.
   *
   * With `drainMs`, jobs end first: new calls reject with `LOCK_CLOSED` and waits end at once, but the locks that are held are
   * renewed, and can be extended and released, until all of them and all jobs under `using` have ended, or `drainMs` has passed.
   * A job that has lost its lock counts as well. `close()` without `drainMs` ends a drain.
   *
   * A service that is garbage collected without a close is closed as soon as it has no lock, call, job, view, election or watch;
   * the first such close emits a `HoldfastWarning` (`HOLDFAST_NOT_CLOSED`).
   * @param options `drainMs`: 0 to 2147483648 ms, or text with a unit. Default: 0
   * @throws `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * process.once('SIGTERM', () => locks.close({ drainMs: '20s' }))
   */
  close(options?: {
    drainMs?: Duration | undefined;
  }): Promise<void>;
  /**
   * Closes the service like `close()`.
   *
   * @example
   * await using locks = await LockService.connect('memory:')
   */
  [Symbol.asyncDispose](): Promise<void>;
}
