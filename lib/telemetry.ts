import { channel, tracingChannel } from 'node:diagnostics_channel'
import type { Connection } from './connection.js'
import { MAX_PERMITS } from './options.js'
import type { LockEvent, Share } from './types.js'

/** @internal The service of a message. */
export interface Source {
  /** The kind of the store: `redis`, `mongodb`, …; empty before the connection. */
  engine: string
  /** The number of its receivers of events, apart from subscribers of channels that came later. */
  receivers: number
  isClosed: boolean
}

/** @internal The key of the `Source` in a message. */
export const SOURCE = Symbol('holdfast.source')

/** @internal Calls a job. */
export type Run = <T>(job: () => T) => T

/** @internal What a call acquires, or an event is about. */
export type Kind = 'lock' | 'semaphore' | 'read' | 'write'

/** @internal Returns the kind of an event. */
export function kindOf(share: Share | undefined): Kind {
  if (share === undefined) return 'lock'
  if (share.limit < MAX_PERMITS) return 'semaphore'
  return share.permits === MAX_PERMITS ? 'write' : 'read'
}

/** @internal A message of the tracing channels, about one call. */
export interface Call {
  /** The method that was called. */
  readonly method: string
  readonly names: readonly string[]
  readonly engine: string
  readonly kind: Kind
  readonly [SOURCE]: Source
  /** A subscriber of `tracing:holdfast:using:start` may replace it: it calls the job, for example in a context of its own. */
  run: Run
  /** Node adds what the promise was settled with. */
  result?: unknown
  error?: unknown
}

const TYPES: readonly LockEvent['type'][] = [
  'acquired',
  'released',
  'renewed',
  'lost',
  'waiting',
  'timeout',
  'aborted',
  'failed',
  'connected',
  'disconnected',
]
const CHANNELS = new Map<string, ReturnType<typeof channel>>(TYPES.map((type) => [type, channel(`holdfast:${type}`)]))
// `any`: without `hasSubscribers` (Node before 20.13) nothing is traced.
const ACQUIRE: any = tracingChannel('holdfast:acquire')
const USING: any = tracingChannel('holdfast:using')

/** @internal Whether a channel of events has a subscriber. */
export const isObserved = (): boolean => TYPES.some((type) => CHANNELS.get(type)!.hasSubscribers)

/** @internal Publishes an event to the subscribers of its channel. */
export function publish(event: LockEvent, source: Source): void {
  const to = CHANNELS.get(event.type)
  if (!to?.hasSubscribers) return
  Object.defineProperty(event, SOURCE, { value: source })
  to.publish(event)
}

/** Returns the message about a call. */
function callOf({ source, prefix }: Connection, method: string, names: unknown, kind: Kind): Call {
  const given: unknown[] = Array.isArray(names) ? names : [names]
  // A name that is not text is rejected by the call.
  const list = given.filter((name) => typeof name === 'string').map((name) => prefix + name)
  return { method, names: list, engine: source.engine, kind, run: runNow, [SOURCE]: source }
}

/** @internal Makes an acquisition, with messages if `tracing:holdfast:acquire:*` has subscribers. */
export function traceAcquire<T>(
  connection: Connection,
  method: string,
  names: string | string[],
  acquire: () => Promise<T>,
  kind: Kind = 'lock',
): Promise<T> {
  return ACQUIRE.hasSubscribers ? ACQUIRE.tracePromise(acquire, callOf(connection, method, names, kind)) : acquire()
}

/** @internal Acquires a lock and calls a job, with messages if `tracing:holdfast:using:*` has subscribers. */
export function traceUsing<T>(
  connection: Connection,
  method: string,
  names: () => unknown,
  using: (run: Run) => Promise<T>,
  kind: Kind = 'lock',
): Promise<T> {
  if (!USING.hasSubscribers) return using(runNow)
  const call = callOf(connection, method, names(), kind)
  return USING.tracePromise(() => using((job) => call.run(job)), call)
}

const runNow: Run = (job) => job()
