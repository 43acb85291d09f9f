// Events on `node:diagnostics_channel`, and `holdfast/otel` with the OpenTelemetry SDK's in-memory exporters.
import assert from 'node:assert/strict'
import { AsyncLocalStorage } from 'node:async_hooks'
import { subscribe, tracingChannel, unsubscribe } from 'node:diagnostics_channel'
import { readFileSync } from 'node:fs'
import { after, afterEach, before, describe, it } from 'node:test'
import { context, SpanStatusCode, trace } from '@opentelemetry/api'
import { AsyncLocalStorageContextManager } from '@opentelemetry/context-async-hooks'
import {
  AggregationTemporality,
  InMemoryMetricExporter,
  MeterProvider,
  PeriodicExportingMetricReader,
} from '@opentelemetry/sdk-metrics'
import { BasicTracerProvider, InMemorySpanExporter, SimpleSpanProcessor } from '@opentelemetry/sdk-trace-base'
import { LockService } from '../index.js'
import { instrument } from '../otel.js'
import { startRedis } from '../scripts/servers.mjs'
import { INDEX, output, until, wrong } from './tools.mjs'

const TYPES = 'acquired released renewed lost waiting timeout aborted failed connected disconnected'.split(' ')

/** Collects the events of all channels while `body` runs. */
async function observed(body) {
  const events = []
  const listener = (event) => events.push(event)
  for (const type of TYPES) subscribe(`holdfast:${type}`, listener)
  try {
    await body(events)
  } finally {
    for (const type of TYPES) unsubscribe(`holdfast:${type}`, listener)
  }
}

const typesOf = (events) => events.map(({ type }) => type)

describe('the channels of events', () => {
  it('have every event of a lock, as onEvent has', async () => {
    await observed(async (events) => {
      const own = []
      const locks = await LockService.connect('memory:', { onEvent: (event) => own.push(event) })
      const lock = await locks.acquire('job', { ttlMs: 60_000 })
      assert.equal(await locks.tryAcquire('job'), null)
      await assert.rejects(locks.acquire('job', { waitMs: 20 }), { code: 'LOCK_TIMEOUT' })
      const controller = new AbortController()
      const aborted = locks.acquire('job', { waitMs: 60_000, signal: controller.signal })
      await until('the wait', () => locks.stats().waiting === 1)
      controller.abort()
      await assert.rejects(aborted, { name: 'AbortError' })
      assert.equal(await locks.acquireLock('job'), false)
      await lock.release()
      await until('the release', () => own.at(-1)?.type === 'released')
      const seen = ['acquired', 'timeout', 'waiting', 'timeout', 'waiting', 'aborted', 'timeout', 'released']
      assert.deepEqual(typesOf(own), seen)
      assert.deepEqual(events, own)
      for (const { engine, name, names } of own) assert.deepEqual({ engine, name, names }, EVENT_OF_JOB)
      const [, once, , waited, , abort] = own
      assert.ok(once.waitedMs >= 0 && once.waitedMs < waited.waitedMs)
      assert.ok(waited.waitedMs >= 20)
      assert.ok(abort.waitedMs > 0)
      await locks.close()
    })
  })

  it('has the waits that a close ends', async () => {
    const own = []
    const locks = await LockService.connect('memory:', { onEvent: (event) => own.push(event) })
    await locks.acquire('job')
    const waiting = locks.acquire('job', { waitMs: 60_000 })
    await until('the wait', () => locks.stats().waiting === 1)
    await Promise.all([assert.rejects(waiting, { code: 'LOCK_CLOSED' }), locks.close()])
    await until('the event', () => own.some(({ type }) => type === 'failed'))
    const { code, reason, waitedMs } = own.find(({ type }) => type === 'failed')
    assert.deepEqual([code, reason], ['LOCK_CLOSED', 'this LockService is closed'])
    assert.ok(waitedMs > 0)
  })

  it('costs no message without a subscriber at the time of connect', async () => {
    const locks = await LockService.connect('memory:')
    await observed(async (events) => {
      await locks.using('job', () => {})
      await locks.ping()
      assert.deepEqual(events, [])
    })
    await locks.close()
  })

  it('has a subscriber that throws, which disturbs no call', async () => {
    const printed = await output(`
      import { subscribe } from 'node:diagnostics_channel'
      import { LockService } from '${INDEX}'
      process.on('uncaughtException', (error) => console.log(error.message))
      subscribe('holdfast:acquired', () => { throw new Error('from a subscriber') })
      const locks = await LockService.connect('memory:')
      console.log(await locks.using('job', () => 'ran'))
      await locks.close()`)
    assert.deepEqual(printed.trim().split('\n').sort(), ['from a subscriber', 'ran'])
  })
})

describe('connected and disconnected', () => {
  it('are an outage of the store, once each', async () => {
    const redis = await startRedis()
    const own = []
    const locks = await LockService.connect(redis.url, { storeTimeoutMs: 1500, onEvent: (event) => own.push(event) })
    try {
      await locks.using('before', () => {})
      await redis.pause()
      for (let i = 0; i < 3; i++) await assert.rejects(locks.tryAcquire('during'), { code: 'LOCK_STORE' })
      await redis.resume()
      await until('an answer', () => locks.ping().catch(() => false))
      await locks.using('after', () => {})
      await until('the last event', () => own.some(({ type, name }) => type === 'released' && name === 'after'))
      const changes = own.filter(({ name }) => name === undefined)
      assert.deepEqual(typesOf(changes), ['disconnected', 'connected'])
      assert.equal(changes[0].engine, 'redis')
      assert.match(changes[0].reason, /1500 ms/)
      assert.deepEqual(Object.keys(changes[1]), ['type', 'engine'])
      const failed = own.filter(({ type }) => type === 'failed')
      assert.equal(failed.length, 3)
      for (const { code, name, waitedMs } of failed) {
        assert.deepEqual([code, name], ['LOCK_STORE', 'during'])
        assert.ok(waitedMs >= 1490)
      }
    } finally {
      await locks.close()
      await redis.stop()
    }
  })
})

const EVENT_OF_JOB = { engine: 'memory', name: 'job', names: ['job'] }

describe('the channels of calls', () => {
  it('have the calls that acquire, and those that run a job', async () => {
    const locks = (await LockService.connect('memory:')).withPrefix('app:')
    const calls = []
    const listeners = (kind) => ({
      start: (call) => calls.push([kind, 'start', call.method, ...call.names]),
      asyncEnd: (call) => calls.push([kind, 'end', call.method, call.engine]),
    })
    const subscribed = ['acquire', 'using'].map((kind) => {
      /** @type {any} */
      const channel = tracingChannel(`holdfast:${kind}`)
      const own = listeners(kind)
      channel.subscribe(own)
      return () => channel.unsubscribe(own)
    })
    try {
      await locks.using('job', () => {})
      await locks.acquireLock('gist')
    } finally {
      for (const end of subscribed) end()
    }
    await locks.acquireLock('unseen')
    assert.deepEqual(calls, [
      ['using', 'start', 'using', 'app:job'],
      ['acquire', 'start', 'using', 'app:job'],
      ['acquire', 'end', 'using', 'memory'],
      ['using', 'end', 'using', 'memory'],
      ['acquire', 'start', 'acquireLock', 'app:gist'],
      ['acquire', 'end', 'acquireLock', 'memory'],
    ])
    await locks.close()
  })
})

describe('holdfast/otel', () => {
  const spans = new InMemorySpanExporter()
  const tracerProvider = new BasicTracerProvider({ spanProcessors: [new SimpleSpanProcessor(spans)] })
  const metrics = new InMemoryMetricExporter(AggregationTemporality.CUMULATIVE)
  const reader = new PeriodicExportingMetricReader({ exporter: metrics, exportIntervalMillis: 2 ** 30 })
  const meterProvider = new MeterProvider({ readers: [reader] })
  const stops = []

  before(() => context.setGlobalContextManager(new AsyncLocalStorageContextManager().enable()))
  after(async () => {
    context.disable()
    await meterProvider.shutdown()
  })
  afterEach(() => {
    for (const stop of stops.splice(0)) stop()
    spans.reset()
  })

  async function instrumented(options) {
    const locks = await LockService.connect('memory:')
    stops.push(instrument(locks, { meterProvider, tracerProvider, ...options }))
    return locks
  }

  /**
   * Returns the points of the metrics: `{ 'holdfast.lost': [{ value, attributes }] }`.
   *
   * @returns {Promise<Record<string, any[]>>}
   */
  async function points() {
    metrics.reset()
    await reader.forceFlush()
    const [{ scopeMetrics }] = metrics.getMetrics().slice(-1)
    const all = scopeMetrics.flatMap((scope) => scope.metrics)
    return Object.fromEntries(all.map(({ descriptor, dataPoints }) => [descriptor.name, dataPoints]))
  }

  it('records waits, holds, outcomes and gauges, by names of low cardinality', async () => {
    const locks = await instrumented({ nameOf: (name) => name.split(':')[0] })
    const lock = await locks.acquire('order:1')
    await locks.tryAcquire('order:1')
    await locks.using('order:2', () => {})
    await locks.acquire('report', { ttlMs: 300, renew: false })
    const waiting = locks.acquire('order:1', { waitMs: 60_000 })
    await until('the wait and the loss', () => locks.stats().waiting === 1 && locks.stats().lost === 1)
    const found = await until('all events', async () => {
      const now = await points()
      const calls = now['holdfast.acquisitions']?.reduce((sum, { value }) => sum + value, 0)
      // The counter begins with 0 when a lease is granted.
      return calls === 4 && now['holdfast.lost']?.some(({ value }) => value === 1) && now
    })
    const valueOf = (metric, wanted) =>
      found[metric].find(({ attributes }) => Object.entries(wanted).every(([key, value]) => attributes[key] === value))
        ?.value
    assert.equal(valueOf('holdfast.acquisitions', { outcome: 'acquired', 'holdfast.name': 'order' }), 2)
    assert.equal(valueOf('holdfast.acquisitions', { outcome: 'busy', 'holdfast.name': 'order' }), 1)
    assert.equal(valueOf('holdfast.lost', { 'holdfast.name': 'report' }), 1)
    assert.equal(valueOf('holdfast.held', {}), 1)
    assert.equal(valueOf('holdfast.waiting', {}), 1)
    assert.equal(valueOf('holdfast.connected', {}), 1)
    assert.equal(valueOf('holdfast.wait', { outcome: 'acquired', 'holdfast.name': 'order' }).count, 2)
    const held = valueOf('holdfast.hold', { outcome: 'lost' })
    assert.ok(held.sum >= 0.02 && held.sum < 20, `${held.sum} s`)
    for (const all of Object.values(found))
      for (const { attributes } of all) {
        assert.equal(attributes['holdfast.engine'], 'memory')
        assert.ok(!String(attributes['holdfast.name']).includes(':'))
      }
    await lock.release()
    await (await waiting).release()
    await locks.close()
  })

  it('has the kind of a lock in spans, and in all metrics but gauges', async () => {
    const locks = await instrumented({ nameOf: () => 'kinds' })
    const { read, write } = locks.readWriteLock('rw')
    const semaphore = locks.semaphore('s', 2)
    await semaphore.using({ permits: 2 }, () => semaphore.tryAcquire())
    await read.using(() => {})
    await (await write.acquire()).release()
    await locks.acquireAndExecute('job', () => {})
    // The points of the other tests have other names.
    const own = async (name) =>
      (await points())[name]?.filter(({ attributes }) => attributes['holdfast.name'] === 'kinds')
    await until('all events', async () => (await own('holdfast.hold'))?.length === 4)
    const kindsOf = async (name) => (await own(name)).map(({ attributes }) => attributes['holdfast.kind']).sort()
    const all = ['lock', 'read', 'semaphore', 'write']
    for (const name of ['hold', 'lost']) assert.deepEqual(await kindsOf(`holdfast.${name}`), all)
    // One of them was busy.
    const calls = ['lock', 'read', 'semaphore', 'semaphore', 'write']
    for (const name of ['wait', 'acquisitions']) assert.deepEqual(await kindsOf(`holdfast.${name}`), calls)
    assert.equal('holdfast.kind' in (await points())['holdfast.held'][0].attributes, false)
    await locks.close()
    const seen = spans.getFinishedSpans().map(({ name, attributes }) => `${name} ${attributes['holdfast.kind']}`)
    assert.deepEqual(seen.sort(), [
      ...calls.map((kind) => `holdfast.acquire ${kind}`),
      ...['lock', 'read', 'semaphore'].map((kind) => `holdfast.using ${kind}`),
    ])
  })

  it('has the metrics of the Grafana dashboard', async () => {
    const locks = await instrumented()
    await locks.using('job', () => {})
    const found = await until('the events', async () => {
      const now = await points()
      return now['holdfast.hold'] && Object.keys(now).map((name) => name.replace('.', '_'))
    })
    const text = readFileSync(new URL('../docs/grafana-dashboard.json', import.meta.url), 'utf8')
    const expressions = text.match(/"expr": ".*"/g) ?? []
    // With the suffixes of Prometheus, and without the attributes.
    const used = expressions.flatMap((expression) => expression.match(/\bholdfast_(?!engine|kind|name)[a-z]+/g) ?? [])
    assert.deepEqual(
      [...new Set(used)].filter((name) => !found.includes(name)),
      [],
    )
    assert.ok(new Set(used).size >= 6, String(used))
    await locks.close()
  })

  it('creates spans: the acquisition and the job are children of using, which is a child of the caller', async () => {
    const locks = await instrumented()
    const tracer = tracerProvider.getTracer('test')
    await tracer.startActiveSpan('request', async (request) => {
      await locks.using('job', async () => {
        await Promise.resolve()
        tracer.startSpan('query').end()
      })
      request.end()
    })
    await locks.close()
    const byName = Object.fromEntries(spans.getFinishedSpans().map((span) => [span.name, span]))
    const idOf = (name) => byName[name].spanContext().spanId
    const parentOf = (name) => byName[name].parentSpanContext?.spanId
    assert.equal(parentOf('holdfast.using'), idOf('request'))
    assert.equal(parentOf('holdfast.acquire'), idOf('holdfast.using'))
    assert.equal(parentOf('query'), idOf('holdfast.using'))
    assert.deepEqual(byName['holdfast.using'].attributes, {
      'holdfast.engine': 'memory',
      'holdfast.kind': 'lock',
      'holdfast.method': 'using',
    })
  })

  it('gives concurrent calls spans of their own, and errors their status', async () => {
    const locks = await instrumented()
    const failing = locks.using('a', () => Promise.reject(new Error('the job failed')))
    const lock = await locks.acquire('b')
    await assert.rejects(failing, /the job failed/)
    assert.equal(await locks.tryAcquire('b'), null)
    await assert.rejects(locks.acquire('b', { waitMs: 10 }), { code: 'LOCK_TIMEOUT' })
    await lock.release()
    await locks.close()
    const seen = spans.getFinishedSpans().map(({ name, status, attributes, parentSpanContext, events }) => ({
      name,
      failed: status.code === SpanStatusCode.ERROR,
      outcome: attributes['holdfast.outcome'],
      hasParent: parentSpanContext !== undefined,
      exceptions: events.map(({ attributes }) => attributes?.['exception.message']),
    }))
    const acquire = { name: 'holdfast.acquire', failed: false, outcome: undefined, hasParent: false, exceptions: [] }
    const counted = (wanted) => seen.filter((span) => JSON.stringify(span) === JSON.stringify(wanted)).length
    assert.equal(counted({ ...acquire, hasParent: true }), 1, 'of using')
    assert.equal(counted(acquire), 1, 'of the lock b')
    assert.equal(counted({ ...acquire, outcome: 'busy' }), 2)
    const failed = { name: 'holdfast.using', failed: true, exceptions: ['the job failed'] }
    assert.equal(counted({ ...acquire, ...failed }), 1)
    assert.equal(seen.length, 5)
  })

  it('records its own service and its views only, until it is stopped', async () => {
    const locks = await instrumented()
    const other = await LockService.connect('memory:')
    await other.using('job', () => {})
    await locks.withPrefix('view:').using('job', () => {})
    assert.equal(spans.getFinishedSpans().length, 2)
    stops.pop()()
    await locks.using('job', () => {})
    assert.equal(spans.getFinishedSpans().length, 2)
    await Promise.all([locks.close(), other.close()])
  })

  it('works without an SDK', async () => {
    const locks = await LockService.connect('memory:')
    const stop = instrument(locks)
    assert.equal(await locks.using('job', () => trace.getActiveSpan() && 'ran'), 'ran')
    stop()
    await locks.close()
  })

  it('instruments a service that is not connected yet', async () => {
    const locks = await LockService.connect('memory:', { lazy: true })
    stops.push(instrument(locks, { meterProvider, tracerProvider, nameOf: () => 'lazy' }))
    await locks.using('job', () => {})
    await until('the hold', async () =>
      (await points())['holdfast.hold']?.some(({ attributes }) => attributes['holdfast.name'] === 'lazy'),
    )
    await locks.close()
  })

  it('marks as busy or aborted only calls that got no lock', async () => {
    const locks = await instrumented()
    const held = await locks.acquire('held')
    for (const result of [false, null]) await locks.using('free', () => result)
    await assert.rejects(
      locks.using('free', () => locks.using('held', { waitMs: 0 }, () => {})),
      { code: 'LOCK_TIMEOUT' },
    )
    await locks.tryUsing('held', () => {})
    await locks.acquireAndExecute('held', () => {})
    const controller = new AbortController()
    const aborted = locks.using('held', { waitMs: 60_000, signal: controller.signal }, () => {})
    await until('the wait', () => locks.stats().waiting === 1)
    controller.abort()
    await assert.rejects(aborted, { name: 'AbortError' })
    await held.release()
    await locks.close()
    const outcomes = spans
      .getFinishedSpans()
      .filter(({ name }) => name === 'holdfast.using')
      .map(({ attributes, status }) => [attributes['holdfast.outcome'], status.code === SpanStatusCode.ERROR])
    const [ran, busy] = [
      [undefined, false],
      ['busy', false],
    ]
    // The inner call, which found its name busy, ends before the outer one, whose job failed.
    assert.deepEqual(outcomes, [ran, ran, busy, [undefined, true], busy, busy, ['aborted', false]])
  })

  it('survives a nameOf that fails, and calls without a name', async () => {
    const locks = await instrumented({ nameOf: (name) => name.split(':')[0].at(9).at(9) })
    const warnings = []
    const collect = (warning) => warnings.push(warning)
    process.on('warning', collect)
    try {
      for (let i = 0; i < 3; i++) assert.equal(await locks.using('order:1', () => 'ran'), 'ran')
      await assert.rejects(
        locks.using(wrong(undefined), () => {}),
        { code: 'LOCK_INVALID_ARGUMENT' },
      )
      await until('the warning', () => warnings.length > 0)
      await new Promise((resolve) => setImmediate(resolve))
    } finally {
      process.off('warning', collect)
      await locks.close()
    }
    assert.deepEqual(
      warnings.map(({ name, code }) => [name, code]),
      [['HoldfastWarning', 'HOLDFAST_EVENT']],
    )
    assert.match(warnings[0].message, /^nameOf of instrument failed: TypeError: /)
  })

  it('adds the gauges of two services, until they are closed', async () => {
    const [one, two] = [await instrumented(), await instrumented()]
    await Promise.all([one.acquire('a'), one.acquire('b'), two.acquire('c')])
    const gauge = async (name) => (await points())[name]?.map(({ value }) => value)
    assert.deepEqual(await gauge('holdfast.held'), [3])
    assert.deepEqual(await gauge('holdfast.connected'), [1])
    await one.close()
    assert.deepEqual(await gauge('holdfast.held'), [1])
    await two.close()
    assert.deepEqual(await gauge('holdfast.held'), [0])
  })

  it('shows an outage that began before it was called', async () => {
    const redis = await startRedis()
    const locks = await LockService.connect(redis.url, { storeTimeoutMs: 1500 })
    try {
      await redis.pause()
      await assert.rejects(locks.ping(), { code: 'LOCK_STORE' })
      stops.push(instrument(locks, { meterProvider, tracerProvider }))
      const connected = async () => (await points())['holdfast.connected']?.at(-1).value
      assert.equal(await connected(), 0)
      await redis.resume()
      await until('an answer', () => locks.ping().catch(() => false))
      assert.equal(await connected(), 1)
    } finally {
      await locks.close()
      await redis.stop()
    }
  })

  it('keeps the context of another subscriber in the job', async () => {
    const storage = new AsyncLocalStorage()
    /** @type {any} */
    const channel = tracingChannel('holdfast:using')
    const own = {
      start(call) {
        const { run } = call
        call.run = (job) => storage.run('theirs', () => run(job))
      },
    }
    channel.subscribe(own)
    const locks = await instrumented()
    const active = await locks.using('job', () => [storage.getStore(), trace.getActiveSpan() !== undefined])
    channel.unsubscribe(own)
    await locks.close()
    assert.deepEqual(active, ['theirs', true])
  })

  it('ends the spans of calls that are in progress when it is stopped', async () => {
    const locks = await instrumented()
    await locks.using('job', () => stops.pop()())
    assert.deepEqual(
      spans.getFinishedSpans().map(({ name }) => name),
      ['holdfast.acquire', 'holdfast.using'],
    )
    await locks.using('unseen', () => {})
    assert.equal(spans.getFinishedSpans().length, 2)
    await locks.close()
  })

  it('rejects what is no option', async () => {
    const locks = await LockService.connect('memory:')
    assert.throws(() => instrument(locks, wrong({ nameof: () => 'x' })), {
      code: 'LOCK_INVALID_ARGUMENT',
      message: /nameof/,
    })
    assert.throws(() => instrument(locks, wrong({ nameOf: 'x' })), { code: 'LOCK_INVALID_ARGUMENT', message: /nameOf/ })
    await locks.close()
  })
})
