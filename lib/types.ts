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
