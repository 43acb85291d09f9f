/** The locks of a list that JavaScript has not read yet. */
export declare class LockList {
  /** Returns the next page as JSON text: an array. `null`: there is none. */
  next(): Promise<string | null>
}

/** A lock service over one store. */
export declare class LockService {
  /** Lists the held locks whose name starts with `prefix`. */
  list(prefix: string): Promise<LockList>
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
  /** Reads the holders of a shared name. Resolves to JSON text: an array, in the order of the grants. */
  inspectShared(name: string): Promise<string>
  /** Releases a shared name of all owners. Resolves to whether it was held. */
  forceReleaseShared(name: string): Promise<boolean>
  /** Releases a name, no matter which owner holds it. Resolves to whether it was held. */
  forceRelease(name: string): Promise<boolean>
  /** Returns the counters as JSON text. */
  stats(): string
  /** The name of the store. */
  get engine(): string
  /** Makes one round trip to the store. Resolves to its duration in milliseconds. */
  ping(): Promise<number>
  /** Returns whether the last operation of the store succeeded, or there was none. */
  isConnected(): boolean
  /** Switches events on or off. */
  setEvents(enabled: boolean): void
  /** Records that jobs run now, or that none runs any more. While one runs, the process does not exit by itself. */
  setRunsJobs(runsJobs: boolean): void
  /**
   * Closes a service that was garbage collected, as soon as it has no lease, call or job. Does not keep the event loop alive.
   * Resolves to whether this call closed it.
   */
  closeUnused(): Promise<boolean>
  /** Closes the service, after a drain of at most `drain_ms`. Zero means no drain. */
  close(drainMs: number): Promise<void>
}

/** The options of one acquisition, or the defaults of a service. */
export interface AcquireRecord {
  ttlMs?: number
  waitMs?: number
  renew?: boolean
  /** `Infinity`: no limit. */
  maxHoldMs?: number
  stallLimitMs?: number
  minHoldMs?: number
  waitsForStore?: boolean
  /** The metadata as JSON text. */
  metadata?: string
  /** The only name is a shared one. One field, because each costs time in every call with this record. */
  share?: ShareRecord
  /** The ticket that `cancel` takes. */
  ticket?: number
}

/** Moves the clock of the store of these services forward by `ms` milliseconds. */
export declare function advance(services: Array<LockService>, ms: number): Promise<void>

/** Answers a question: with JSON text, or with the text of an error. */
export declare function answer(number: number, value: string | undefined | null, error: string): void

/** Cancels the acquisition, or the attempt to connect, with this ticket. */
export declare function cancel(ticket: number): void

/** The options of `connect`. */
export interface Config {
  urls: Array<string>
  keyPrefix?: string
  collection?: string
  table?: string
  storeTimeoutMs?: number
  minReplicas?: number
  maxConnections?: number
  sessionTimeoutMs?: number
  defaults: AcquireRecord
  /** Whether `notify` receives events, in addition to losses. */
  events: boolean
  /** Whether `notify` is asked for the login of every new connection. */
  credentials?: boolean
  listenUrl?: string
  /** Variables of the environment. */
  environment?: Record<string, string>
  /** How long `connect` tries again. */
  connectMs?: number
  caFile?: string
  certFile?: string
  keyFile?: string
  /** The text of the files, instead of their paths. */
  ca?: string
  cert?: string
  key?: string
  servername?: string
  insecure?: boolean
  /** The ticket that `cancel` takes. */
  ticket?: number
}

/** Connects to a store. `notify` receives JSON text: an array of events and losses. It must not throw. */
export declare function connect(config: Config, notify: (arg: string) => void): Promise<LockService>

/**
 * Returns the description of a lease: owner token, fencing token, ttl in milliseconds, whether it is renewed, and the JSON text of
 * its metadata, which may be empty. They are separated by spaces.
 */
export declare function describe(id: number): string | null

/** Extends a lease to at least `ttl_ms` milliseconds from now on. */
export declare function extend(id: number, ttlMs: number): Promise<void>

/**
 * Releases the lease of `using` or `acquireAndExecute`. Resolves to its description, or to null if it was released before. Rejects
 * with `LOCK_LOST` if it was lost.
 */
export declare function finish(id: number): Promise<string | null>

/** Removes the number of a lease. The lease continues. Returns its (first) name if it is still held and renewed. */
export declare function forget(id: number): string | null

/** Whether the lease is held, by the native clock. */
export declare function isHeld(id: number): boolean

/** Ends the lease of a name, or all of a shared name, in the store of these services. Resolves to whether the name was held. */
export declare function lose(services: Array<LockService>, name: string, isShared: boolean): Promise<boolean>

/** Returns the JSON text of the `LOCK_LOST` error if the lease is lost by the native clock. */
export declare function loss(id: number): string | null

/**
 * Waits for `ms` milliseconds, or until `cancel` with the ticket. Resolves to the milliseconds that have passed. `is_in_background`: the
 * event loop does not wait for it.
 */
export declare function pause(ms: number, ticket: number, isInBackground: boolean): Promise<number>

/** Releases a lease. Resolves to its description if this call released it, otherwise to null. */
export declare function release(id: number): Promise<string | null>

/** Returns the rest of the lease in milliseconds, by the native clock. */
export declare function remainingMs(id: number): number

/** Keeps the name of a lease busy after an earlier release, until `ms` milliseconds have passed since the grant. */
export declare function setMinHold(id: number, ms: number): void

/** What an acquisition has of a shared name. */
export interface ShareRecord {
  permits: number
  limit: number
}

/** Sends a message when the lease is lost. Returns `false` if it was released, and so cannot be lost. */
export declare function watch(id: number): boolean
