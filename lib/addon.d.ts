/** A lock service over one store. */
export declare class LockService {
  /** Makes one attempt. Resolves to whether this service holds the name now. `NaN` means the default ttl. */
  acquireByName(name: string, ttlMs: number): Promise<boolean>
  /** Releases a lease of `acquireByName`. Resolves to whether this call released it. */
  releaseByName(name: string): Promise<boolean>
  /** Acquires a lease. Resolves to its number, or to zero if a name is busy or the call was cancelled. `NaN` means the default. */
  acquire(names: string | Array<string>, ttlMs: number, waitMs: number, flags: number, more?: AcquireRecord | undefined | null): Promise<number>
  /** Transfers a lease to this service, by its owner token. Resolves to its number. */
  transfer(names: Array<string>, token: string, fence: string, options: AcquireRecord): Promise<number>
  /** Reads the holder of a name. Resolves to JSON text: an array, which is empty if the name is free. */
  inspect(name: string): Promise<string>
  /** Lists the held locks whose name starts with `prefix`. Resolves to JSON text: an array. */
  list(prefix: string): Promise<string>
  /** Releases a name, no matter which owner holds it. Resolves to whether it was held. */
  forceRelease(name: string): Promise<boolean>
  /** Returns the counters as JSON text. */
  stats(): string
  /** The name of the store. */
  get engine(): string
  /** Closes the service. */
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
  /** The metadata as JSON text. */
  metadata?: string
  /** The ticket that `cancel` takes. */
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
  /** Whether `notify` receives events, in addition to losses. */
  events: boolean
  caFile?: string
  certFile?: string
  keyFile?: string
  insecure?: boolean
}

/** Connects to a store. `notify` receives JSON text: an array of events and losses. It must not throw. */
export declare function connect(config: Config, notify: (arg: string) => void): Promise<LockService>

/** Returns the other properties of a lease as JSON text. */
export declare function describe(id: number): string | null

/** Extends a lease to at least `ttl_ms` milliseconds from now on. */
export declare function extend(id: number, ttlMs: number): Promise<void>

/** Returns the fencing token; zero for an unknown lease. */
export declare function fencingToken(id: number): bigint

/** Releases the lease of `using` or `acquireAndExecute`. Resolves to the JSON text of a `LOCK_LOST` error, or to null. */
export declare function finish(id: number): Promise<string | null>

/** Removes the number of a lease. The lease continues. Returns whether it is still held and renewed. */
export declare function forget(id: number): boolean

/** Whether the lease is held, by the native clock. */
export declare function isHeld(id: number): boolean

/** Returns the JSON text of the `LOCK_LOST` error if the lease is lost by the native clock. */
export declare function loss(id: number): string | null

/** Releases a lease. Resolves to whether this call released it. */
export declare function release(id: number): Promise<boolean>

/** Returns the rest of the lease in milliseconds, by the native clock. */
export declare function remainingMs(id: number): number

/** Sends a message when the lease is lost. Returns `false` if it was released, and so cannot be lost. */
export declare function watch(id: number): boolean
