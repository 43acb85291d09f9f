/** A lock service over one store. */
export declare class LockService {
  /** Resolves to whether the name is held. A ttl of `NaN` means the default. */
  acquireByName(name: string, ttlMs: number): Promise<boolean>
  releaseByName(name: string): Promise<boolean>
  /** Resolves to the number of the lease, or to zero: busy or cancelled. `NaN` means the default of the service. */
  acquire(names: string | Array<string>, ttlMs: number, waitMs: number, flags: number, more?: AcquireRecord | undefined | null): Promise<number>
  /** Takes over a lease by its owner token. Resolves to its number. */
  transfer(names: Array<string>, token: string, fence: string, options: AcquireRecord): Promise<number>
  /** Resolves to JSON text: an array with the name if it is held. */
  inspect(name: string): Promise<string>
  /** Resolves to JSON text: an array. */
  list(prefix: string): Promise<string>
  forceRelease(name: string): Promise<boolean>
  /** The counters, as JSON text. */
  stats(): string
  get engine(): string
  close(): Promise<void>
}

/** The options of one acquisition, or the defaults of a service. */
export interface AcquireRecord {
  ttlMs?: number
  waitMs?: number
  renew?: boolean
  maxHoldMs?: number
  stallLimitMs?: number
  minHoldMs?: number
  /** JSON text. */
  metadata?: string
  /** Identifies the call for `cancel`. */
  ticket?: number
}

/** Cancels the acquisition with this ticket. */
export declare function cancel(ticket: number): void

/** The options of `connect`. */
export interface Config {
  urls: Array<string>
  keyPrefix?: string
  collection?: string
  table?: string
  storeTimeoutMs?: number
  minReplicas?: number
  defaults: AcquireRecord
  /** Whether `notify` gets events, beside losses. */
  events: boolean
  caFile?: string
  certFile?: string
  keyFile?: string
  insecure?: boolean
}

/** Connects to a store. `notify` gets JSON text: an array of events and losses. It must not throw. */
export declare function connect(config: Config, notify: (arg: string) => void): Promise<LockService>

/** The other parts of a lease, as JSON text. */
export declare function describe(id: number): string | null

/** Makes a lease last at least `ttl_ms` from now on. */
export declare function extend(id: number, ttlMs: number): Promise<void>

export declare function fencingToken(id: number): bigint

/** Releases the lease of `using` or `acquireAndExecute`. Resolves to the JSON text of a `LOCK_LOST` error, or to null. */
export declare function finish(id: number): Promise<string | null>

/** Removes the number of a lease. The lease itself goes on. True: it is still held and renewed. */
export declare function forget(id: number): boolean

/** Whether the lease still counts, by the native clock. */
export declare function isHeld(id: number): boolean

/** The JSON text of the `LOCK_LOST` error, once the lease is lost by the native clock. */
export declare function loss(id: number): string | null

/** Releases a lease. Resolves to whether this call released it. */
export declare function release(id: number): Promise<boolean>

/** How long the lease still counts, by the native clock. */
export declare function remainingMs(id: number): number

/** Sends a message when the lease is lost. False: it was released, and cannot be lost. */
export declare function watch(id: number): boolean
