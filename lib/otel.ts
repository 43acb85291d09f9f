// OpenTelemetry: metrics and spans from the messages of `node:diagnostics_channel`.
import { subscribe, tracingChannel, unsubscribe } from 'node:diagnostics_channel'
import { context, metrics, SpanKind, SpanStatusCode, trace } from '@opentelemetry/api'
import type { Attributes, Context, Meter, MeterProvider, Span, Tracer, TracerProvider } from '@opentelemetry/api'
import {
  callback,
  connectionIn,
  describe,
  fields,
  isLockError,
  kindOf,
  observe,
  SOURCE,
  stackOf,
  warn,
} from './index.js'
import type { Call, Kind, LockService, Observed } from './index.js'
import type { LockEvent } from './types.js'

/** The options of `instrument`. */
export interface InstrumentOptions {
  /**
   * Returns the value of the attribute `holdfast.name` for a lock's name: `order:42` → `order`. The values must be few. `undefined`, and an
   * error, which is emitted once as a `HoldfastWarning`: the attribute is absent. Default: it is always absent, because the number of names
   * is not limited.
   */
  nameOf?: ((name: string) => string | undefined) | undefined
  /** Default: the global provider. */
  meterProvider?: MeterProvider | undefined
  /** Default: the global provider. */
  tracerProvider?: TracerProvider | undefined
}

const OPTIONS = ['nameOf', 'meterProvider', 'tracerProvider']
/** The upper bounds of the histograms, in seconds. */
const BOUNDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800]
/** The values of `outcome`, by the event that ends a call. */
const OUTCOMES = { acquired: 'acquired', timeout: 'busy', aborted: 'aborted', failed: 'failed' } as const

/**
 * Records metrics and spans of a lock service, and of its views, with OpenTelemetry. Call it after the start of the SDK: the global
 * provider of metrics is that of the moment of the call.
 *
 * | metric | | attributes |
 * |---|---|---|
 * | `holdfast.wait` | histogram, s: from a call to its end | `outcome`: `acquired`, `busy`, `aborted`, `failed` |
 * | `holdfast.hold` | histogram, s: from a grant to the end of the lease | `outcome`: `released`, `lost` |
 * | `holdfast.acquisitions` | counter: the calls that ended; a restored lock counts as acquired | `outcome` as of `holdfast.wait` |
 * | `holdfast.lost` | counter: the leases that ended before their release | |
 * | `holdfast.held`, `holdfast.waiting` | gauges: the leases that are held, the calls that wait | |
 * | `holdfast.connected` | gauge: 1, or 0 after an operation of the store that failed, until one succeeds | |
 *
 * Spans: `holdfast.acquire` for a call that acquires a lock, and `holdfast.using` for one that runs a job, with the span of its
 * acquisition and those of the job as children; `holdfast.outcome` is `busy` or `aborted` if there was no lock. Both need Node 20.13 or
 * later. Every metric and span has `holdfast.engine`; all but the gauges have `holdfast.kind`: `lock`, `semaphore`, `read`, `write`.
 * Elections have no spans: they wait for days. The gauges of several services on the same kind of store are added (`holdfast.connected`:
 * the smallest), and end with `close()`.
 *
 * @returns a function that ends the recording
 * @throws `LOCK_INVALID_ARGUMENT`
 *
 * @example
 * const stop = instrument(locks, { nameOf: (name) => name.split(':')[0] })
 */
export function instrument(locks: LockService, options: InstrumentOptions = {}): () => void {
  const { nameOf, meterProvider, tracerProvider } = fields('options', options, OPTIONS) as InstrumentOptions
  if (nameOf !== undefined) callback('nameOf', nameOf)
  const observed = observe(connectionIn(locks))
  const { source } = observed
  const service: Service = {
    observed,
    isOwn: (message) => (message as { [SOURCE]?: unknown })[SOURCE] === source,
    attributesOf(names, kind, more) {
      const attributes: Attributes = { ...more, 'holdfast.kind': kind }
      if (source.engine !== '') attributes['holdfast.engine'] = source.engine
      const name = names[0] === undefined || !nameOf ? undefined : shortName(nameOf, names[0])
      if (name !== undefined) attributes['holdfast.name'] = name
      return attributes
    },
  }
  const ends = [
    recordMetrics((meterProvider ?? metrics).getMeter('holdfast'), service),
    addGauges(meterProvider ?? metrics.getMeterProvider(), service),
    recordSpans((tracerProvider ?? trace).getTracer('holdfast'), service),
    () => observed.end(),
  ]
  return () => {
    for (const end of ends.splice(0)) end()
  }
}

/** A service that is instrumented. */
interface Service {
  readonly observed: Observed
  /** Whether a message is about this service. */
  isOwn(message: unknown): boolean
  attributesOf(names: readonly string[], kind: Kind, more?: Attributes): Attributes
}

let isNameWarned = false

/** Calls the user's `nameOf`. */
function shortName(nameOf: (name: string) => string | undefined, name: string): string | undefined {
  try {
    const short = nameOf(name)
    if (short === undefined || typeof short === 'string') return short
    throw new TypeError('it returned no text')
  } catch (thrown) {
    if (!isNameWarned) warn('HOLDFAST_EVENT', `nameOf of instrument failed: ${stackOf(thrown)}`)
    isNameWarned = true
    return undefined
  }
}

function recordMetrics(meter: Meter, { isOwn, attributesOf }: Service): () => void {
  const seconds = { unit: 's', advice: { explicitBucketBoundaries: BOUNDS } }
  const wait = meter.createHistogram('holdfast.wait', { description: 'From a call to its end', ...seconds })
  const hold = meter.createHistogram('holdfast.hold', {
    description: 'From a grant to the end of the lease',
    ...seconds,
  })
  const acquisitions = meter.createCounter('holdfast.acquisitions', { description: 'Calls that ended' })
  const lost = meter.createCounter('holdfast.lost', { description: 'Leases that ended before their release' })
  const record = (event: LockEvent): void => {
    switch (event.type) {
      case 'lost':
        lost.add(1, attributesOf(event.names, kindOf(event.share)))
      // falls through
      case 'released':
        return hold.record(event.heldMs / 1000, attributesOf(event.names, kindOf(event.share), { outcome: event.type }))
      case 'acquired':
        // A rate over a counter that begins with its first loss does not show that loss.
        lost.add(0, attributesOf(event.names, kindOf(event.share)))
      // falls through
      case 'timeout':
      case 'aborted':
      case 'failed': {
        const attributes = attributesOf(event.names, kindOf(event.share), { outcome: OUTCOMES[event.type] })
        wait.record(event.waitedMs / 1000, attributes)
        acquisitions.add(1, attributes)
      }
    }
  }
  const listener = (message: unknown): void => {
    if (isOwn(message)) record(message as LockEvent)
  }
  const types = [...Object.keys(OUTCOMES), 'released', 'lost']
  for (const type of types) subscribe(`holdfast:${type}`, listener)
  return () => {
    for (const type of types) unsubscribe(`holdfast:${type}`, listener)
  }
}

/** The instrumented services of each provider: services on the same kind of store have their gauges in common. */
const instrumented = new WeakMap<MeterProvider, Set<Service>>()

/** The gauges: the value of one service, and how the values of several are combined. */
const GAUGES = {
  held: { description: 'Leases that are held', of: ({ observed }: Service) => observed.stats().held, all: sum },
  waiting: {
    description: 'Calls that wait for a busy name',
    of: ({ observed }: Service) => observed.stats().waiting,
    all: sum,
  },
  connected: {
    description: '1, or 0 after an operation of the store that failed, until one succeeds',
    of: ({ observed }: Service) => Number(observed.isConnected()),
    all: (one: number, other: number) => Math.min(one, other),
  },
}

function sum(one: number, other: number): number {
  return one + other
}

function addGauges(provider: MeterProvider, service: Service): () => void {
  let services = instrumented.get(provider)
  if (!services) {
    services = new Set()
    instrumented.set(provider, services)
    observeGauges(provider.getMeter('holdfast'), services)
  }
  services.add(service)
  return () => services.delete(service)
}

function observeGauges(meter: Meter, services: Set<Service>): void {
  // The SDK exports the last value of a gauge for ever.
  const engines = new Set<string>()
  for (const [name, { description, of, all }] of Object.entries(GAUGES)) {
    meter.createObservableGauge(`holdfast.${name}`, { description }).addCallback((result) => {
      const values = new Map<string, number>()
      for (const service of services) {
        const { engine, isClosed } = service.observed.source
        if (isClosed) services.delete(service)
        // A lazy service that is not connected has no engine.
        if (isClosed || engine === '') continue
        const before = values.get(engine)
        values.set(engine, before === undefined ? of(service) : all(before, of(service)))
        engines.add(engine)
      }
      for (const engine of engines) if (!values.has(engine) && name !== 'connected') values.set(engine, 0)
      for (const [engine, value] of values) result.observe(value, { 'holdfast.engine': engine })
    })
  }
}

/** The span of a call, and whether its job has begun. */
interface Traced {
  readonly span: Span
  readonly isUsing: boolean
  hasRun: boolean
}

function recordSpans(tracer: Tracer, { isOwn, attributesOf }: Service): () => void {
  const open = new Map<Call, Traced>()
  // The context of the `using` whose synchronous part runs now. Its acquisition begins there.
  let inside: Context | undefined
  let isStopped = false
  const begin = (call: Call, isUsing: boolean): Context | undefined => {
    if (isStopped || !isOwn(call)) return undefined
    const parent = inside ?? context.active()
    const attributes = attributesOf(call.names, call.kind, { 'holdfast.method': call.method })
    const span = tracer.startSpan(
      isUsing ? 'holdfast.using' : 'holdfast.acquire',
      { kind: SpanKind.CLIENT, attributes },
      parent,
    )
    open.set(call, { span, isUsing, hasRun: false })
    return trace.setSpan(parent, span)
  }
  const end = (call: Call): void => {
    const traced = open.get(call)
    if (!traced) return
    open.delete(call)
    const { span, isUsing, hasRun } = traced
    const { error, result } = call
    const isBusy =
      error === undefined
        ? isUsing
          ? !hasRun
          : result === null || result === false
        : isLockError(error, 'LOCK_TIMEOUT')
    if (isBusy && !hasRun) {
      span.setAttribute('holdfast.outcome', 'busy')
    } else if (!hasRun && error !== undefined && !isLockError(error)) {
      // The reason of the caller's signal.
      span.setAttribute('holdfast.outcome', 'aborted')
    } else if (error !== undefined) {
      span.recordException(error instanceof Error ? error : describe(error))
      span.setStatus({ code: SpanStatusCode.ERROR })
    }
    span.end()
    if (isStopped && open.size === 0) unsubscribeAll()
  }
  const channels = [
    {
      channel: tracingChannel('holdfast:acquire') as any,
      listeners: { start: (call: Call) => void begin(call, false), asyncEnd: end },
    },
    {
      channel: tracingChannel('holdfast:using') as any,
      listeners: {
        start(call: Call) {
          const within = begin(call, true)
          if (!within) return
          const { run } = call
          call.run = (job) => {
            const traced = open.get(call)
            if (traced) traced.hasRun = true
            return context.with(within, () => run(job))
          }
          inside = within
        },
        end: () => void (inside = undefined),
        asyncEnd: end,
      },
    },
  ]
  const unsubscribeAll = () => {
    for (const { channel, listeners } of channels) channel.unsubscribe(listeners)
  }
  for (const { channel, listeners } of channels) channel.subscribe(listeners)
  return () => {
    // Calls in progress end their spans.
    isStopped = true
    if (open.size === 0) unsubscribeAll()
  }
}
