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
