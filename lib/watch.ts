import { fullName } from './connection.js'
import type { Connection } from './connection.js'
import { positiveMs } from './durations.js'
import { fromNative, isLockError } from './errors.js'
import { infosOf } from './json.js'
import { native } from './native.js'
import { fields, nameOf, signalOf, WATCH } from './options.js'
import { newTicket } from './signals.js'
import type { LockInfo, SignalLike } from './types.js'

const DEFAULT_INTERVAL_MS = 1000
/** The shortest time between two reads of a name. */
const SHORTEST_INTERVAL_MS = 10

/** @internal A name that this process watches: one poll for all iterations. */
export class Watch {
  /** The reason of the end, of which each reader creates an error with its own frames. `undefined`: the service was closed. */
  failure: { thrown: unknown } | undefined
  hasEnded = false
  #isRunning = false
  /** Whether a reader waits that has read nothing yet. */
  #isDue = false
  readonly #readers = new Set<Iteration>()
  readonly #connection: Connection
  readonly #full: string
  #ticket: number | undefined

  constructor(connection: Connection, full: string) {
    this.#connection = connection
    this.#full = full
  }

  add(reader: Iteration): void {
    this.#readers.add(reader)
  }

  /** Reads the name while a reader waits. `atOnce`: without the rest of a pause. */
  poll(atOnce: boolean): void {
    if (atOnce) this.#isDue = true
    if (!this.#isRunning) void this.#run()
    else if (atOnce) this.wake()
  }

  remove(reader: Iteration): void {
    if (!this.#readers.delete(reader) || this.#readers.size > 0) return
    this.wake()
    if (!this.#isRunning) this.#end()
  }

  /** Ends the pause before the next read. */
  wake(): void {
    if (this.#ticket !== undefined) native.cancel(this.#ticket)
  }

  async #run(): Promise<void> {
    this.#isRunning = true
    try {
      // A pause follows each read, so that a name that changes all the time is not read all the time.
      while (this.#waiting().length > 0) await this.#pause(await this.#read())
      this.#isRunning = false
      if (this.#readers.size === 0) this.#end()
    } catch (thrown) {
      if (!isLockError(fromNative(thrown, ''), 'LOCK_CLOSED')) this.failure = { thrown }
      this.#end()
    }
  }

  #waiting(): Iteration[] {
    return [...this.#readers].filter((reader) => reader.isWaiting)
  }

  #end(): void {
    const { watches } = this.#connection
    this.hasEnded = true
    if (watches.get(this.#full) === this) watches.delete(this.#full)
    for (const reader of this.#readers) reader.changed()
  }

  /** Reads the name. Resolves to the rest of its lease in milliseconds, if it is held. */
  async #read(): Promise<number> {
    const { native: service, prefix } = this.#connection
    const readers = this.#waiting()
    this.#isDue = false
    try {
      const found = infosOf(await service.inspect(this.#full), prefix)[0] ?? null
      for (const reader of readers) reader.read(found)
      return found?.remainingMs ?? Infinity
    } catch (thrown) {
      const error = fromNative(thrown, prefix)
      // An outage of the store is no change.
      if (isLockError(error, 'LOCK_STORE') && error.retryable) return Infinity
      throw thrown
    }
  }

  /** Waits until the next read is due. */
  async #pause(remainingMs: number): Promise<void> {
    const intervals = Array.from(this.#readers, ({ intervalMs }) => intervalMs)
    const ms = Math.max(SHORTEST_INTERVAL_MS, Math.min(remainingMs, ...intervals))
    if (intervals.length === 0 || this.#isDue) return
    this.#ticket = newTicket()
    await native.pause(ms, this.#ticket, false)
    this.#ticket = undefined
  }
}

/** Whether two states are those of one grant. A MongoDB replica set shows the token of a new grant later. */
function isSameHolder(one: LockInfo | null, other: LockInfo | null): boolean {
  if (one === null || other === null) return one === other
  const tokens = [one.fencingToken, other.fencingToken]
  if (!tokens.includes(null)) return tokens[0] === tokens[1]
  const parts = ({ holder }: LockInfo) => holder && [holder.host, holder.pid, Number(holder.since)].join()
  return parts(one) === parts(other)
}

/** @internal `watch`. */
export function watch(connection: Connection, name: unknown, second: unknown): AsyncIterableIterator<LockInfo | null> {
  const options = fields('options', second, WATCH)
  const { intervalMs = DEFAULT_INTERVAL_MS, signal } = options ?? {}
  const full = fullName(connection, nameOf(name))
  return new Iteration(
    connection,
    full,
    positiveMs('intervalMs', intervalMs),
    signal === undefined ? undefined : signalOf(signal),
  )
}

/** One iteration of a watched name. */
class Iteration implements AsyncIterableIterator<LockInfo | null> {
  readonly #connection: Connection
  readonly #full: string
  readonly intervalMs: number
  readonly #signal: SignalLike | undefined
  #watch: Watch | undefined
  #hasEnded = false
  /** The state that was read last, and the one that was returned last. */
  #latest: LockInfo | null | undefined
  #returned: LockInfo | null | undefined
  /** Resolves after a change. `undefined`: no call of `next` waits. */
  #change: Promise<void> | undefined
  /** Ends the wait: after a change, and when the watch has ended. */
  changed = () => {}

  constructor(connection: Connection, full: string, intervalMs: number, signal: SignalLike | undefined) {
    this.#connection = connection
    this.#full = full
    this.intervalMs = intervalMs
    this.#signal = signal
  }

  [Symbol.asyncIterator](): this {
    return this
  }

  /** Whether it waits for a state. Without such an iteration the name is not read. */
  get isWaiting(): boolean {
    return this.#change !== undefined
  }

  /** Receives each state that was read while it waits. */
  read(state: LockInfo | null): void {
    this.#latest = state
    if (this.#isNew()) this.changed()
  }

  /** Whether the last state is another one than that which was returned last. */
  #isNew(): boolean {
    const [latest, returned] = [this.#latest, this.#returned]
    return latest !== undefined && (returned === undefined || !isSameHolder(returned, latest))
  }

  async next(): Promise<IteratorResult<LockInfo | null, undefined>> {
    while (!this.#hasEnded) {
      if (this.#signal?.aborted) {
        this.#end()
        throw this.#signal.reason
      }
      const watch = (this.#watch ??= this.#begin())
      if (this.#isNew()) return { done: false, value: (this.#returned = this.#latest!) }
      if (watch.hasEnded) {
        this.#end()
        if (watch.failure) throw fromNative(watch.failure.thrown, this.#connection.prefix)
        break
      }
      const change = (this.#change ??= new Promise((resolve) => {
        this.changed = () => {
          this.#change = undefined
          resolve()
        }
      }))
      watch.poll(this.#latest === undefined)
      await change
    }
    return { done: true, value: undefined }
  }

  async return(): Promise<IteratorResult<LockInfo | null, undefined>> {
    this.#end()
    return { done: true, value: undefined }
  }

  /** Joins the other iterations of the name. */
  #begin(): Watch {
    const { watches } = this.#connection
    const watch = watches.get(this.#full) ?? new Watch(this.#connection, this.#full)
    watches.set(this.#full, watch)
    this.#signal?.addEventListener('abort', this.#onAbort)
    watch.add(this)
    return watch
  }

  readonly #onAbort = () => this.changed()

  #end(): void {
    this.#hasEnded = true
    this.#signal?.removeEventListener('abort', this.#onAbort)
    this.#watch?.remove(this)
    this.changed()
  }
}
