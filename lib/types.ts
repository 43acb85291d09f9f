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
