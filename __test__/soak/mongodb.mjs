// Stalls and bursts on separate MongoDB servers. Each exported case resolves to its figures, and rejects when a guarantee is
// broken. `npm run soak` runs all of them with their defaults, mongodb-stall.spec.mjs the short ones.
import assert from 'node:assert/strict'
import { MongoClient } from 'mongodb'
import { startMongod } from '../../scripts/servers.mjs'
import { LockService } from '../../index.js'
import { startProxy } from '../proxy.mjs'
import { prepared, sleep, until } from '../tools.mjs'

/** Slack for a machine that stalls for a moment. */
const SLACK_MS = 3000
const STORE_TIMEOUT_MS = 5000

/** Each stall stops a server from answering, and resolves to a function that continues it. */
const STALLS = {
  async SIGSTOP({ server }) {
    await server.pause()
    return () => server.resume()
  },
  async fsyncLock({ client }) {
    await client.db('admin').command({ fsync: 1, lock: true })
    return () => client.db('admin').command({ fsyncUnlock: 1 })
  },
}

/**
 * Asserts that a call was rejected with a retryable error of the store.
 *
 * @param {PromiseSettledResult<unknown>} result
 */
function assertRetryable(result) {
  const reason = result.status === 'rejected' ? result.reason : undefined
  assert.ok(reason?.code === 'LOCK_STORE' && reason.retryable, reason?.stack)
}

/** Runs `body` with a server, a client of the official driver, and the collection of the locks. */
/** @param {{ replicaSet?: boolean, args?: string[] }} options @param {(context: any) => Promise<any>} body */
async function onServer({ replicaSet = false, args = [] }, body) {
  const server = await startMongod({ replicaSet, args })
  const client = new MongoClient(server.url, { maxPoolSize: 4 })
  const services = []
  try {
    await client.connect()
    const connect = async (options, url = server.url) => {
      const service = await LockService.connect(url, options)
      services.push(service)
      return service
    }
    return await body({ server, client, connect, locks: client.db('holdfast').collection('locks') })
  } finally {
    server.resume()
    await Promise.all(services.map((service) => service.close()))
    await client.close()
    await server.stop()
  }
}

/** Acquires and releases unique names at a rate, until `end()`. */
class Pairs {
  #timer
  #open = new Set()
  #count = 0
  /** `[started, ended, error]` of each call, in milliseconds of `performance.now()`. */
  calls = []

  constructor(service, perSecond) {
    const startedAt = performance.now()
    this.#timer = setInterval(() => {
      const due = ((performance.now() - startedAt) / 1000) * perSecond
      // After a stall of the machine the backlog is left out: it would be a burst.
      if (due - this.#count > perSecond) this.#count = Math.floor(due)
      while (this.#count < due) {
        const pair = this.#pair(service, `pair${this.#count++}`).finally(() => this.#open.delete(pair))
        this.#open.add(pair)
      }
    }, 5)
  }

  async #pair(service, name) {
    const started = performance.now()
    let error
    try {
      const lock = await service.tryAcquire(name, { ttlMs: 30_000, renew: false })
      await lock.release()
    } catch (thrown) {
      error = thrown
    }
    this.calls.push([started, performance.now(), error])
  }

  async end() {
    clearInterval(this.#timer)
    await Promise.all(this.#open)
  }
}

/** The server stalls under load and continues: calls succeed again, leases survive, nothing is left. */
export async function stall({
  replicaSet = false,
  how = 'SIGSTOP',
  perSecond = 300,
  seconds = 12,
  observeMs = 6000,
} = {}) {
  return onServer({ replicaSet }, async ({ server, client, connect, locks }) => {
    const service = await connect()
    const held = await service.acquire('held', { ttlMs: 60_000 })
    const pairs = new Pairs(service, perSecond)
    await sleep(1500)
    assert.ok(pairs.calls.length > 0, 'the load works before the stall')
    const continues = await STALLS[how]({ server, client })
    await sleep(seconds * 1000)
    await continues()
    const continued = performance.now()
    const inspected = await service.inspect('held').then(
      () => performance.now() - continued,
      (error) => error,
    )
    await sleep(Math.max(0, observeMs - (performance.now() - continued)))
    await pairs.end()

    const granted = pairs.calls.filter(([started, , error]) => started > continued && !error)
    const firstMs = Math.min(...granted.map(([, ended]) => ended - continued))
    const late = pairs.calls.filter(([started]) => started > continued + 2000 + SLACK_MS / 2)
    const failedLate = late.filter(([, , error]) => error)
    const slowest = Math.max(...pairs.calls.map(([started, ended]) => ended - started))
    const figures = {
      how,
      perSecond,
      seconds,
      firstMs,
      inspectedMs: inspected,
      late: late.length,
      failedLate: failedLate.length,
      slowest,
    }
    for (const [, , error] of pairs.calls)
      assert.ok(!error || (error.code === 'LOCK_STORE' && error.retryable), error?.stack)
    assert.ok(firstMs < 2000 + SLACK_MS, `calls succeed again: ${JSON.stringify(figures)}`)
    assert.ok(typeof inspected === 'number', `inspect answers: ${inspected}`)
    // Without recovery all of them fail. On a machine that is too slow for the rate some time out.
    assert.ok(
      failedLate.length < late.length * 0.75,
      `calls fail after the stall: ${JSON.stringify(figures)}: ${failedLate[0]?.[2]}`,
    )
    // A pair is two calls.
    assert.ok(slowest < 2 * (STORE_TIMEOUT_MS + 1000) + SLACK_MS, JSON.stringify(figures))
    assert.equal(held.isHeld, true)
    await held.extend(90_000)
    const left = () => locks.countDocuments({ _id: { $ne: 'held' } })
    figures.nothingLeftMs = performance.now() - continued
    await until('nothing is left', async () => (await left()) === 0, 2000 + SLACK_MS)
    assert.equal(await held.release(), true)
    return JSON.stringify(figures)
  })
}

/** Sent commands are never answered, while the driver's monitor reaches the server: calls succeed again after the limit. */
export async function silence({ replicaSet = true, count = 300 } = {}) {
  const args = ['--setParameter', 'enableTestCommands=1']
  return onServer({ replicaSet, args }, async ({ client, connect }) => {
    const service = await connect({ storeTimeoutMs: 800, connectMs: 20_000 })
    await (await service.tryAcquire('before')).release()
    const failCommands = ['insert', 'update', 'delete', 'findAndModify', 'find']
    const data = { failCommands, blockConnection: true, blockTimeMS: 90_000, appName: 'holdfast' }
    await client.db('admin').command({ configureFailPoint: 'failCommand', mode: 'alwaysOn', data })
    const results = await Promise.allSettled(
      Array.from({ length: count }, (_, index) => service.tryAcquire(`n${index}`, { ttlMs: 2000 })),
    )
    for (const result of results) assertRetryable(result)
    const began = performance.now()
    // Its reply waits for the blocked commands.
    const off = client.db('admin').command({ configureFailPoint: 'failCommand', mode: 'off' })
    const works = () => service.using('after', () => true).catch(() => false)
    await until('calls succeed again', works, 4 * 800 + 2000 + SLACK_MS)
    const resumedMs = performance.now() - began
    await off
    return JSON.stringify({ resumedMs })
  })
}

/** The server answers its monitors and no command, until the engine replaces the client: then calls succeed. */
export async function replacedClient({ storeTimeoutMs = 800 } = {}) {
  return onServer({}, async ({ server, connect }) => {
    const proxy = await startProxy(server.port)
    const monitors = new Set()
    let isSilent = false
    proxy.onRequest = (connection, data) => {
      // A field of the monitor's hello.
      if (data.includes('maxAwaitTimeMS')) monitors.add(connection)
      const isCommand = ['insert', 'update', 'delete', 'find', 'aggregate'].some((name) => data.includes(name))
      if (isSilent && monitors.size === 1 && isCommand) connection.isBlackholed = true
    }
    try {
      const url = `mongodb://127.0.0.1:${proxy.port}/holdfast?directConnection=true&heartbeatFrequencyMS=500`
      const service = await connect({ storeTimeoutMs, connectMs: 20_000 }, url)
      await prepared(() => service.using('before', () => {}))
      await until('the monitor is connected', () => monitors.size === 1)
      isSilent = true
      const began = performance.now()
      let failed = 0
      const works = () =>
        service
          .using('after', { waitMs: 0 }, () => true)
          .catch((error) => {
            assert.ok(error.code === 'LOCK_STORE' && error.retryable, error.stack)
            failed++
            return false
          })
      await until('service resumes', works, 4 * storeTimeoutMs + 4000 + SLACK_MS)
      const resumedMs = performance.now() - began
      assert.ok(failed > 0, 'calls failed before the client was replaced')
      assert.equal(monitors.size, 2, 'the monitors of two clients')
      return JSON.stringify({ failed, resumedMs })
    } finally {
      await proxy.close()
    }
  })
}

/** The server executes the writes of rejected calls after their connections were closed: a close leaves nothing behind. */
export async function lateWrites({ replicaSet = true, count = 30, storeTimeoutMs = 3000 } = {}) {
  return onServer({ replicaSet }, async ({ client, connect, locks }) => {
    const service = await connect({ storeTimeoutMs, connectMs: 20_000 })
    await (await service.tryAcquire('before')).release()
    const blocked = async () => {
      const { inprog } = await client.db('admin').command({ currentOp: 1, ns: 'holdfast.locks', waitingForLock: true })
      return inprog.filter(({ command }) => command.insert).length
    }
    const continues = await STALLS.fsyncLock({ client })
    const began = performance.now()
    const calls = Promise.allSettled(
      Array.from({ length: count }, (_, index) => service.tryAcquire(`n${index}`, { ttlMs: 120_000 })),
    )
    // Queries are answered during an fsyncLock. So the engine takes the inserts for hung, and closes their connections.
    while (performance.now() - began < 2 * storeTimeoutMs + 500)
      await Promise.all([service.inspect('n').catch(() => {}), sleep(50)])
    for (const result of await calls) assertRetryable(result)
    assert.equal(await blocked(), count, 'inserts that the server will execute')
    const closing = performance.now()
    const closed = service.close().then(() => performance.now() - closing)
    await sleep(200)
    await continues()
    const closeMs = await closed
    const left = await locks.countDocuments()
    await sleep(1000)
    assert.deepEqual([left, await locks.countDocuments()], [0, 0], 'documents after close(), and a second later')
    return JSON.stringify({ closeMs })
  })
}

/** Many attempts for free names at once: each is granted or rejects in time and leaves nothing; other leases are renewed. */
export async function burst({ replicaSet = true, count = 5000, bursts = 1, ttlMs = 6000 } = {}) {
  return onServer({ replicaSet }, async ({ connect, locks }) => {
    const service = await connect()
    const held = await service.acquire('held', { ttlMs })
    const figures = []
    for (let round = 0; round < bursts; round++) {
      const began = performance.now()
      const memory = process.memoryUsage.rss()
      let peak = memory
      const watch = setInterval(() => (peak = Math.max(peak, process.memoryUsage.rss())), 50)
      const took = []
      const results = await Promise.allSettled(
        Array.from({ length: count }, (_, index) =>
          service
            .tryAcquire(`burst${round}-${index}`, { ttlMs: 120_000, renew: false })
            .finally(() => took.push(performance.now() - began)),
        ),
      )
      clearInterval(watch)
      const granted = results.flatMap((result) => (result.status === 'fulfilled' ? [result.value] : []))
      for (const result of results) if (result.status === 'rejected') assertRetryable(result)
      const slowest = Math.max(...took)
      figures.push({ granted: granted.length, slowest, bytesPerCall: Math.round((peak - memory) / count) })
      assert.ok(slowest < STORE_TIMEOUT_MS + 1000 + SLACK_MS, `a call took ${slowest} ms`)
      assert.ok(granted.length > count / 20, `${granted.length} of ${count} were granted`)
      assert.equal(held.isHeld, true, 'the lease is renewed during the burst')
      const names = granted.length
      await until(
        'the rejected calls leave nothing',
        async () => (await locks.countDocuments({ _id: /^burst/ })) <= names,
        1000 + SLACK_MS,
      )
      while (granted.length > 0) await Promise.all(granted.splice(0, 500).map((lock) => lock.release()))
      assert.equal(held.isHeld, true, 'the lease is renewed during the releases')
    }
    await until('nothing is left', async () => (await locks.countDocuments({ _id: /^burst/ })) === 0, 1000 + SLACK_MS)
    assert.equal(await held.release(), true)
    return JSON.stringify(figures)
  })
}

/** Many waiters for one name, in some services: all enter the queue, in order within a service, and are served. */
export async function waiters({ replicaSet = true, services = 1, count = 1000 } = {}) {
  return onServer({ replicaSet }, async ({ connect, locks }) => {
    const holder = await connect()
    const other = await holder.acquire('other', { ttlMs: 6000 })
    const held = await holder.acquire('n', { ttlMs: 60_000 })
    const all = await Promise.all(Array.from({ length: services }, () => connect()))
    const each = Math.ceil(count / services)
    /** @type {number[][]} */
    const order = all.map(() => [])
    const began = performance.now()
    const calls = all.flatMap((service, index) =>
      Array.from({ length: each }, (_, number) =>
        service.acquire('n', { waitMs: 120_000, ttlMs: 30_000 }).then((lock) => {
          order[index].push(number)
          return lock.release()
        }),
      ),
    )
    calls.forEach((call) => call.catch(() => {}))
    const queued = async () => (await locks.findOne({ _id: 'n' }, { projection: { queue: 1 } }))?.queue?.length ?? 0
    if (replicaSet)
      await until(
        'all are in the queue',
        async () => (await queued()) === each * services || Promise.race([...calls, sleep(1)]).then(() => false),
        30_000,
      )
    const enteredMs = performance.now() - began
    assert.equal(await held.release(), true)
    await Promise.all(calls)
    const servedMs = performance.now() - began - enteredMs
    for (const numbers of order)
      assert.deepEqual(
        numbers,
        numbers.toSorted((a, b) => a - b),
      )
    assert.equal(other.isHeld, true)
    assert.equal(await other.release(), true)
    return JSON.stringify({ services, waiters: each * services, enteredMs, servedMs })
  })
}

/** A replica set is locked by fsyncLock for 12 s, as backups lock it, under 300 pairs per second. */
export const fsyncLockOfReplicaSet = () => stall({ how: 'fsyncLock', replicaSet: true })

/** A replica set is stopped for 20 s under 100 pairs per second. */
export const stopFor20s = () => stall({ replicaSet: true, perSecond: 100, seconds: 20 })

/** A standalone server is locked for 40 s under 50 pairs per second. */
export const fsyncLockFor40s = () => stall({ how: 'fsyncLock', perSecond: 50, seconds: 40 })

/** Two bursts, one after the other, without a stall. */
export const twoBursts = () => burst({ bursts: 2 })

/** 20 000 attempts for free names at once. */
export const burstOf20000 = () => burst({ count: 20_000 })

/** 1 000 waiters for one name, in ten services. */
export const waitersOfTenServices = () => waiters({ services: 10 })
