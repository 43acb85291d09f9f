import { connectionOf } from './connect.js'
import { acquire, fullName, register, REJECT_BUSY, shownUrls, unregister } from './connection.js'
import type { Connection } from './connection.js'
import { secondsOf, spanMs } from './durations.js'
import { createElection } from './election.js'
import type { Election, ElectOptions, Leadership } from './election.js'
import { answerOf, LockError } from './errors.js'
import { receiver } from './events.js'
import { infosOf } from './json.js'
import { lazily } from './lazy.js'
import { list } from './list.js'
import { createLock, registerLock } from './lock.js'
import type { Lock } from './lock.js'
import { createReadWriteLock, createSemaphore } from './named.js'
import type { ReadWriteLock, Semaphore } from './named.js'
import { native } from './native.js'
import { ACQUIRE, fields, nameOf, namesOf, requestOf, restorationOf, text } from './options.js'
import { acquireAndExecute, using } from './run.js'
import { newTicket } from './signals.js'
import { traceAcquire } from './telemetry.js'
import type { Source } from './telemetry.js'
import { watch } from './watch.js'
import type {
  AcquireOptions,
  Attempt,
  ConnectOptions,
  Duration,
  ExecuteOptions,
  LockInfo,
  LockStats,
  OncePerOptions,
  Target,
  TransferableLock,
  WatchOptions,
} from './types.js'

const inspect = Symbol.for('nodejs.util.inspect.custom')
/** @internal Returns the connection of a service, for `testing.ts` and `otel.ts`. */
export let connectionIn: (service: LockService) => Connection

/**
 * A lock service over one store. Create one per process with `LockService.connect`. Its methods may be detached:
 * `const { acquire } = locks`.
 */
export class LockService implements AsyncDisposable {
  static {
    connectionIn = (service) => service.#connection
  }

  readonly #connection: Connection

  /**
   * Connects to a store, and contacts it once before the promise resolves. Rejects after `storeTimeoutMs` (5 s by default), with
   * `connectMs` later. With `lazy` it resolves at once, and the first call connects.
   *
   * | target | store |
   * |---|---|
   * | none | `HOLDFAST_URL` in the environment if set, otherwise a SQLite file of this machine in the user's state folder: for development |
   * | `memory:` or `memory:NAME` | this process only, for unit tests |
   * | `sqlite:PATH` | every process on this machine |
   * | `redis://`, `rediss://` (TLS), `redis+unix:///PATH` (a socket) | Redis 6.2 or later, one node |
   * | `redis+sentinel://h1,h2,h3/MASTER`, `rediss+sentinel://…` | the Redis master of that name, which its sentinels report |
   * | `redis+cluster://h1,h2,h3`, `rediss+cluster://…` | Redis Cluster 7.0 or later |
   * | a list of three or more `redis://` or `rediss://` | a quorum of independent Redis nodes: a lock is held if a majority of them has it |
   * | `mongodb://`, `mongodb+srv://` | MongoDB 5.0 or later: standalone or replica set |
   * | `postgres://h1,h2/DATABASE`, `postgresql://…` | PostgreSQL 12 or later: of several servers the one that accepts writes |
   * | `mysql://`, `mariadb://` | MariaDB 10.6 or later; MySQL 8.0 or later (tests of the contract and of logins run on 9.7; 8 was not tried) |
   * | `etcd://h1,h2`, `etcds://` | etcd 3.4 or later |
   * | `zookeeper://h1,h2/folder`, `zookeepers://` | ZooKeeper 3.6 or later |
   *
   * `valkey` may replace `redis` in a URL. `{ host, port, database }` is one Redis node without a URL.
   *
   * A target that is present but `undefined`, `null` or empty is rejected, and so is an empty `HOLDFAST_URL`: probably a setting
   * is missing. With `NODE_ENV=production` the embedded store emits one `HoldfastWarning` (`HOLDFAST_EMBEDDED_STORE`).
   *
   * @throws `LOCK_STORE` when the store cannot be reached within `storeTimeoutMs` or rejects the connection,
   * `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const locks = await LockService.connect('redis://127.0.0.1:6379', { defaults: { ttlMs: '1m' } })
   */
  static connect(): Promise<LockService>
  static connect(target: Target | readonly Target[], options?: ConnectOptions): Promise<LockService>
  static connect(options: ConnectOptions & { url?: Target | readonly Target[] }): Promise<LockService>
  static async connect(...given: unknown[]): Promise<LockService> {
    const request = connectionOf(given[0], given[1], given.length > 0)
    const { urls, defaults } = request.config
    const source: Source = { engine: '', receivers: Number(request.config.events), isClosed: false }
    const receive = receiver(request, source)
    const connect = async (ticket: number) => {
      const service = await native.connect({ ...request.config, ticket }, receive)
      source.engine = service.engine
      return service
    }
    const service = request.lazy ? lazily(connect, defaults) : await answerOf(connect(newTicket()))
    return new LockService(
      register({
        native: service,
        prefix: '',
        jobs: { running: 0 },
        outage: { isWarned: false },
        elections: new Set(),
        watches: new Map(),
        renews: defaults.renew ?? true,
        connectedTo: shownUrls(urls),
        source,
      }),
    )
  }

  private constructor(connection?: Connection) {
    if (!(connection?.native instanceof native.LockService)) {
      const origin = 'a LockService comes from `await LockService.connect(…)`, not from new'
      throw new LockError('LOCK_INVALID_ARGUMENT', origin)
    }
    this.#connection = connection
    for (const [name, { value }] of Object.entries(Object.getOwnPropertyDescriptors(LockService.prototype))) {
      if (name === 'constructor') continue
      Object.defineProperty(this, name, { value: value.bind(this), configurable: true, writable: true })
    }
  }

  /**
   * The gist's `acquireLock`: makes one attempt. The lease is not renewed: it ends with its release or after the ttl. A name that
   * this service holds is busy for this service as well.
   * @param ttlSeconds in **seconds**, fractions allowed: more than 0, at most 2147483.648. Default: 30, or `defaults.ttlMs`
   * @returns `true`: this service holds the lock. `false`: the name is busy, or the lease ended before a blocked event loop
   * received it
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * if (await locks.acquireLock('report', 60)) {
   *   await sendReport().finally(() => locks.releaseLock('report'))
   * }
   */
  async acquireLock(name: string, ttlSeconds?: number): Promise<boolean> {
    const connection = this.#connection
    const full = fullName(connection, nameOf(name))
    const ttlMs = ttlSeconds === undefined ? NaN : secondsOf(ttlSeconds)
    return await traceAcquire(connection, 'acquireLock', name, () =>
      answerOf(connection.native.acquireByName(full, ttlMs), connection.prefix),
    )
  }

  /**
   * The gist's `releaseLock`: releases a lock that `acquireLock` of this service acquired, and never another holder's lock.
   * @returns `true`: this call released it, with the exceptions of `Lock.release`. `false`: this service did not hold it (not
   * acquired, expired, or transferred)
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * if (!(await locks.releaseLock('report'))) console.log('the lease had ended')
   */
  async releaseLock(name: string): Promise<boolean> {
    const { native, prefix } = this.#connection
    return await answerOf(native.releaseByName(fullName(this.#connection, nameOf(name))), prefix)
  }

  /**
   * The gist's `acquireAndExecute`: makes one attempt, calls `fn` while it holds the lock, and releases the lock. The lease is
   * renewed only with `renew: true`; without it the lock expires after the ttl, also while `fn` runs. The process does not exit by
   * itself while `fn` runs.
   * @returns the result of `fn`; `undefined`, without a call of `fn`, if the name is busy
   * @throws the error of `fn`, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`; with `signal`: `signal.reason`
   *
   * @example
   * await locks.acquireAndExecute({ name: 'report', ttlSeconds: 60, minHoldMs: '30s' }, () => sendReport())
   */
  acquireAndExecute<T>(options: ExecuteOptions, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>
  acquireAndExecute<T>(
    name: string,
    ttlSeconds: number | undefined,
    fn: (lock: Lock) => T | PromiseLike<T>,
  ): Promise<T | undefined>
  acquireAndExecute<T>(name: string, fn: (lock: Lock) => T | PromiseLike<T>): Promise<T | undefined>
  acquireAndExecute<T>(first: unknown, second?: unknown, third?: unknown): Promise<T | undefined> {
    return acquireAndExecute(this.#connection, first, second, third)
  }

  /**
   * Acquires a lock on one name, or on all of up to 1000 names (etcd, ZooKeeper: 60) at the same time, and waits while a name is busy.
   * Meanwhile the names before it in sort order are busy for other calls. In a Redis Cluster these are the names of earlier slots. On
   * MongoDB and a quorum no names are reserved.
   * @throws `LOCK_TIMEOUT` when a name is still busy after `waitMs`, `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`,
   * `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const lock = await locks.acquire(['account:1', 'account:2'], { waitMs: '5s' })
   * await sendReport().finally(() => lock.release())
   */
  async acquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock> {
    const wanted = namesOf(names)
    const request = requestOf(fields('options', options, ACQUIRE), this.#connection.renews)
    const connection = this.#connection
    const acquired = traceAcquire(connection, 'acquire', wanted, () =>
      acquire(connection, wanted, request, REJECT_BUSY),
    )
    return registerLock((await acquired)!)
  }

  /**
   * Acquires a lock like `acquire`, but makes one attempt and does not wait.
   * @returns the lock; `null` if a name is busy
   * @throws `signal.reason` after an abort, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const lock = await locks.tryAcquire('report')
   * console.log(lock ? 'acquired' : 'busy')
   * await lock?.release()
   */
  async tryAcquire(names: string | readonly string[], options?: AcquireOptions): Promise<Lock | null> {
    const wanted = namesOf(names)
    const request = requestOf(fields('options', options, ACQUIRE), this.#connection.renews)
    request.waitMs = 0
    const connection = this.#connection
    const lock = await traceAcquire(connection, 'tryAcquire', wanted, () => acquire(connection, wanted, request, 0))
    return lock && registerLock(lock)
  }

  /**
   * Acquires a lock like `acquire`, calls `fn` while it holds the lock, and releases the lock. The process does not exit by itself
   * while `fn` runs.
   * @returns the result of `fn`
   * @throws `LOCK_LOST` after the end of `fn` when the lease was lost while `fn` ran (`cause`: the error of `fn`, if it threw);
   * otherwise the error of `fn`; `LOCK_TIMEOUT`, `signal.reason`, `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const receipt = await locks.using('order:42', { waitMs: '5s' }, async (lock) => {
   *   return charge('order:42', { signal: lock.signal, fencingToken: lock.fencingToken })
   * })
   */
  using<T>(
    names: string | readonly string[],
    options: AcquireOptions | undefined,
    fn: (lock: Lock) => T | PromiseLike<T>,
  ): Promise<T>
  using<T>(names: string | readonly string[], fn: (lock: Lock) => T | PromiseLike<T>): Promise<T>
  using<T>(names: unknown, second: unknown, third?: unknown): Promise<T> {
    return using(this.#connection, 'using', names, second, third) as Promise<T>
  }

  /**
   * Calls `fn` like `using` if the name is free. Otherwise returns the holder: another process does the job already. Makes one
   * attempt; with `waitMs` it waits that long.
   * @returns `{ ran: true, value }` with the result of `fn`; `{ ran: false, holder }`, without a call of `fn`, if a name is busy
   * @throws as `using`, without `LOCK_TIMEOUT`
   *
   * @example
   * const attempt = await locks.tryUsing('report', () => createReport())
   * if (!attempt.ran) console.log('skipped: running on', attempt.holder?.host)
   */
  tryUsing<T>(
    names: string | readonly string[],
    options: AcquireOptions | undefined,
    fn: (lock: Lock) => T | PromiseLike<T>,
  ): Promise<Attempt<T>>
  tryUsing<T>(names: string | readonly string[], fn: (lock: Lock) => T | PromiseLike<T>): Promise<Attempt<T>>
  tryUsing<T>(names: unknown, second: unknown, third?: unknown): Promise<Attempt<T>> {
    return using(this.#connection, 'tryUsing', names, second, third) as Promise<Attempt<T>>
  }

  /**
   * Calls `fn` once per period, in the process that calls first: for jobs of a schedule that runs in every instance. Calls `fn` like
   * `tryUsing`, but waits for a busy name for 1 s, at most half of the period. When `fn` returns, the name stays busy for the rest of
   * `periodMs`. When it throws, the name is free at once, and a call that waits, or the next one, runs the job. When the store does not
   * answer at the end of the job, the call resolves, and the end is repeated in the background for 5 minutes, or for the ttl if that is
   * longer. Until that succeeds, the name is free after the end of the lease.
   * @returns as `tryUsing`; `holder` is the process that runs the job or ran it, or `null` where the store does not know it
   * @throws as `tryUsing`
   *
   * @example
   * await locks.oncePer('report', { periodMs: '50m' }, () => sendReport())
   */
  oncePer<T>(name: string, options: OncePerOptions, fn: (lock: Lock) => T | PromiseLike<T>): Promise<Attempt<T>> {
    return using(this.#connection, 'oncePer', name, options, fn) as Promise<Attempt<T>>
  }

  /**
   * Takes part in the election of a leader. Waits in the queue of the name, without a limit and through outages of the store, calls `fn`
   * while this process leads, and waits again when `fn` has settled. `fn` should run until its `signal` aborts. A leader that ignores
   * the signal runs at the same time as its successor; a resource that refuses smaller values of `term` is safe. `close({ drainMs })`
   * ends the election, and the next candidate leads as soon as `fn` has settled. With `maxLeaders` several candidates lead at the same
   * time.
   * @throws `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const election = locks.elect('scheduler', { ttlMs: '10s' }, async ({ signal, term }) => {
   *   while (!signal.aborted) await runNextTask({ signal, fencingToken: term })
   * })
   * await election.stop()
   */
  elect(name: string, options: ElectOptions | undefined, fn: (leadership: Leadership) => unknown): Election
  elect(name: string, fn: (leadership: Leadership) => unknown): Election
  elect(name: unknown, second: unknown, third?: unknown): Election {
    return createElection(this.#connection, name, second, third)
  }

  /**
   * Returns a semaphore: at most `limit` permits of the name are in use at the same time, in all processes. Sends nothing to the store.
   * A call is granted while the permits in use and its own are at most the smallest limit of the call and of all holders. The name is
   * another one than that of a lock with the same text, and the same one as that of a read/write lock. Not on a Redis quorum, a
   * standalone MongoDB and a sharded cluster of MongoDB: its calls reject there.
   * @param limit a whole number from 1 to 1048576
   * @throws `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const reports = locks.semaphore('reports', 5)
   * await reports.using({ waitMs: '1m' }, () => createReport())
   */
  semaphore(name: string, limit: number): Semaphore {
    return createSemaphore(this.#connection, name, limit)
  }

  /**
   * Returns a read/write lock: many readers, or one writer. Sends nothing to the store. First come, first served: a reader that comes
   * after a waiting writer waits behind it. For the name and the stores see `semaphore`.
   * @throws `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const { read, write } = locks.readWriteLock('catalog')
   * await read.using(() => createReport())
   * await write.using({ waitMs: '1m' }, () => sendReport())
   */
  readWriteLock(name: string): ReadWriteLock {
    return createReadWriteLock(this.#connection, name)
  }

  /**
   * Watches the holder of a name: yields the state at first, and after each change of the holder. Reads the name once per `intervalMs`,
   * and only while `next()` waits; holders in between are not seen. Outages of the store are no change, and neither
   * is another number of waiting calls. Ends when the service is closed.
   * @throws while it is iterated: `signal.reason` after an abort, `LOCK_STORE` if it is not retryable; at the call:
   * `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * for await (const leader of locks.watch('scheduler')) {
   *   console.log('leader:', leader?.holder?.host ?? 'none')
   *   if (leader === null) break
   * }
   */
  watch(name: string, options?: WatchOptions): AsyncIterableIterator<LockInfo | null> {
    return watch(this.#connection, name, options)
  }

  /**
   * Transfers a lock of another process or service to this service, from its `transferable()` or the JSON text of that. The lock
   * gets a new owner token. From then on the former holder can neither extend nor release it. It finds its lock lost at its next
   * renewal or call, so transfer a lock only after its former holder has finished its work.
   * @throws `LOCK_LOST` when the lease has ended or was already transferred, `LOCK_STORE`, `LOCK_CLOSED`,
   * `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const text = JSON.stringify(lock.transferable()) // in the other process
   * const mine = await locks.restore(text)
   * await mine.release()
   */
  async restore(transferable: TransferableLock | string): Promise<Lock> {
    const { names, token, fencingToken, options } = restorationOf(transferable)
    const { native, prefix } = this.#connection
    const full = names.map((name) => fullName(this.#connection, name))
    const id = await answerOf(native.transfer(full, token, fencingToken, options), prefix)
    return registerLock(createLock(id, names, prefix))
  }

  /**
   * Reads the holder of a name.
   * @returns the state of the lock; `null` if the name is free
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const info = await locks.inspect('order:42')
   * console.log(info ? `held by process ${info.holder?.pid}` : 'free')
   */
  async inspect(name: string): Promise<LockInfo | null> {
    const { native, prefix } = this.#connection
    const found = await answerOf(native.inspect(fullName(this.#connection, nameOf(name))), prefix)
    return infosOf(found, prefix)[0] ?? null
  }

  /**
   * Lists the held locks whose name starts with `prefix`: literal text, not a pattern. Semaphores and read/write locks are not listed.
   * Each page has `storeTimeoutMs`. The event loop runs between pages.
   * @returns the locks, sorted by the bytes of their names. Await the result for an array, or iterate over it with `for await`
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * const orders = await locks.list({ prefix: 'order:' })
   * for await (const { name, remainingMs } of locks.list()) console.log(name, remainingMs)
   */
  list(options?: { prefix?: string | undefined }): Promise<LockInfo[]> & AsyncIterable<LockInfo> {
    return list(this.#connection, options)
  }

  /**
   * Releases a name, no matter which owner holds it. The holder loses the lock at its next renewal.
   * @returns `true`: the name was held and is free now. `false`: it was free
   * @throws `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * console.log((await locks.forceRelease('order:42')) ? 'released' : 'it was free')
   */
  async forceRelease(name: string): Promise<boolean> {
    const { native, prefix } = this.#connection
    return await answerOf(native.forceRelease(fullName(this.#connection, nameOf(name))), prefix)
  }

  /**
   * Makes one round trip to the store, for a health check.
   * @returns its duration in milliseconds
   * @throws `LOCK_STORE` when the store does not answer within `storeTimeoutMs`, `LOCK_CLOSED`
   *
   * @example
   * console.log(`the store answers in ${await locks.ping()} ms`)
   */
  async ping(): Promise<number> {
    return await answerOf(this.#connection.native.ping())
  }

  /**
   * Returns a view of this service: a `LockService` on the same connections whose names begin with `prefix` in the store, after
   * `keyPrefix`. Results and errors of the view have the names without it; a name and the prefix have at most 512 bytes together.
   * `onEvent` receives the whole names. Counters are those of the service, and `close()` closes the service.
   *
   * @example
   * const billing = locks.withPrefix('billing:')
   * await billing.using('invoice:7', sendInvoice) // the lock "billing:invoice:7"
   *
   * @throws `LOCK_INVALID_ARGUMENT`
   */
  withPrefix(prefix: string): LockService {
    return new LockService({ ...this.#connection, prefix: this.#connection.prefix + text('prefix', prefix) })
  }

  /**
   * Returns the counters of this service.
   *
   * @example
   * console.log(locks.stats().waiting)
   */
  stats(): LockStats {
    return JSON.parse(this.#connection.native.stats())
  }

  /**
   * Releases the held locks, ends waits with `LOCK_CLOSED`, and closes the connections. A lock that was held is lost to its
   * holder: its `signal` aborts with `LOCK_LOST`, and `using` rejects with it. The abort comes before the release in the store,
   * and before the promise resolves. Later calls reject with `LOCK_CLOSED`. Takes at most `storeTimeoutMs`, or up to 1 s longer
   * when the store does not answer or the event loop is blocked. May be called again.
   *
   * With `drainMs`, jobs end first: new calls reject with `LOCK_CLOSED` and waits end at once, but the locks that are held are
   * renewed, and can be extended and released, until all of them and all jobs under `using` have ended, or `drainMs` has passed.
   * A job that has lost its lock counts as well. `close()` without `drainMs` ends a drain.
   *
   * A service that is garbage collected without a close is closed as soon as it has no lock, call, job, view, election or watch;
   * the first such close emits a `HoldfastWarning` (`HOLDFAST_NOT_CLOSED`).
   * @param options `drainMs`: 0 to 2147483648 ms, or text with a unit. Default: 0
   * @throws `LOCK_INVALID_ARGUMENT`
   *
   * @example
   * process.once('SIGTERM', () => locks.close({ drainMs: '20s' }))
   */
  async close(options?: { drainMs?: Duration | undefined }): Promise<void> {
    const drainMs = fields('options', options, ['drainMs'])?.['drainMs']
    const limit = drainMs === undefined ? 0 : spanMs('drainMs', drainMs)
    const { elections, watches } = this.#connection
    unregister(this.#connection)
    for (const election of elections) void election.stop()
    const closing = this.#connection.native.close(limit)
    this.#connection.source.isClosed = true
    for (const watch of watches.values()) watch.wake()
    await answerOf(closing)
  }

  /**
   * Closes the service like `close()`.
   *
   * @example
   * await using locks = await LockService.connect('memory:')
   */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close()
  }

  /** @internal Returns what `console.log` shows. */
  [inspect](): object {
    const { held, waiting } = this.stats()
    const { connectedTo, prefix } = this.#connection
    return prefix === '' ? { connectedTo, held, waiting } : { connectedTo, prefix, held, waiting }
  }
}
