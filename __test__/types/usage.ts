// Valid code, with the exact types of its results. Compiled, never run.
import { isLockError, LockError, LockService } from '../../index.js'
import type {
  AcquireOptions,
  Attempt,
  ConnectOptions,
  Defaults,
  Duration,
  Election,
  ElectOptions,
  Holder,
  ExecuteOptions,
  Json,
  Leadership,
  Lock,
  LockErrorCode,
  LockEvent,
  LockInfo,
  LockJson,
  LockStats,
  NamedLock,
  OncePerOptions,
  PermitInfo,
  PermitOptions,
  PermitUsingOptions,
  ReadWriteLock,
  Semaphore,
  Share,
  SharedInfo,
  TransferableLock,
  Signal,
  SignalLike,
  Target,
  TlsOptions,
  WatchOptions,
} from '../../index.js'

/** True only for identical types, not for `any` or a wider type. */
type Equal<A, B> = (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false
declare function same<A, B>(equal: Equal<A, B>): void
declare const signal: SignalLike

export async function connections() {
  const tls: TlsOptions = { caFile: 'ca', certFile: 'cert', keyFile: 'key', insecure: true }
  const defaults: Defaults = { ttlMs: 1, waitMs: Infinity, renew: false, maxHoldMs: 1, stallLimitMs: 1, minHoldMs: 0 }
  const onEvent = (event: LockEvent) => void event
  const where: ConnectOptions = { keyPrefix: '', collection: 'c', table: 't', tls }
  const options: ConnectOptions = { ...where, storeTimeoutMs: 1, minReplicas: 1, defaults, onEvent }
  const urls = ['redis://a', 'redis://b'] as const
  const target: Target = { href: 'redis://a' }
  const calls = [
    LockService.connect(target),
    LockService.connect([target, 'redis://b'], options),
    LockService.connect({ url: [target] }),
    LockService.connect(),
    LockService.connect('memory:'),
    LockService.connect('memory:', options),
    LockService.connect(urls),
    LockService.connect([...urls], {}),
    LockService.connect({}),
    LockService.connect(options),
    LockService.connect({ url: 'memory:', ...options }),
    LockService.connect({ url: urls }),
    LockService.connect({ host: 'h', port: 1, database: 0, username: 'u', password: 'p', connectMs: '1m', lazy: true }),
    LockService.connect('redis://h', {
      password: async () => 'p',
      tls: { ca: 'pem', cert: 'pem', key: 'pem', servername: 's' },
    }),
    LockService.connect('redis://h', {
      credentials: async () => ({ password: 'p' }),
      defaults: { onStoreError: 'wait' },
    }),
    LockService.connect({ onEvent: async () => {} }),
    LockService.connect({ onEvent: (event) => same<typeof event, LockEvent>(true) }),
  ]
  same<typeof calls, Promise<LockService>[]>(true)
}

export async function theGist(locks: LockService) {
  const acquired = [locks.acquireLock('n'), locks.acquireLock('n', 0.5), locks.acquireLock('n', undefined)]
  const calls = [...acquired, locks.releaseLock('n')]
  same<typeof calls, Promise<boolean>[]>(true)

  const more: ExecuteOptions = { name: 'n', ttlMs: '30s', maxHoldMs: 1, stallLimitMs: 1, metadata: { a: 1 } }
  void more
  const options: ExecuteOptions = { name: 'n', ttlSeconds: 0.5, waitMs: 1, renew: true, minHoldMs: 1, signal }
  const [number, text, nothing, list] = await Promise.all([
    locks.acquireAndExecute(options, async () => 5),
    locks.acquireAndExecute('n', 60, () => 'text' as const),
    locks.acquireAndExecute('n', () => {}),
    locks.acquireAndExecute('n', undefined, async (lock) => lock.names),
  ])
  same<typeof number, number | undefined>(true)
  same<typeof text, 'text' | undefined>(true)
  same<typeof nothing, void | undefined>(true)
  same<typeof list, string[] | undefined>(true)
  const given = locks.acquireAndExecute({ name: 'n' }, ({ signal, fencingToken }) => ({ signal, fencingToken }))
  same<typeof given, Promise<{ signal: Signal; fencingToken: bigint } | undefined>>(true)
  const explicit = await locks.acquireAndExecute<Date | null>('n', async () => null)
  same<typeof explicit, Date | null | undefined>(true)
  const either = await locks.acquireAndExecute('n', (): number | Promise<number> => 5)
  same<typeof either, number | undefined>(true)
}

export async function pastTheGist(locks: LockService) {
  const metadata: Json = { job: 'report', list: [1, 'two', null, { deep: true }], missing: undefined }
  const limits: AcquireOptions = { maxHoldMs: 1, stallLimitMs: 1, minHoldMs: 1 }
  const all: AcquireOptions = { ttlMs: 1, waitMs: Infinity, renew: true, signal, metadata, ...limits }
  interface Job {
    id: number
    tags?: string[]
  }
  const job: Job = { id: 1 }
  await locks.acquire('n', { metadata: job })
  const names = ['a', 'b'] as const
  const lock = await locks.acquire('n')
  same<typeof lock, Lock>(true)
  const locked = [locks.acquire('n', all), locks.acquire(names), locks.acquire([...names], {})]
  locked.push(locks.acquire('n', undefined))
  same<typeof locked, Promise<Lock>[]>(true)
  const maybe = await locks.tryAcquire(names, all)
  same<typeof maybe, Lock | null>(true)
  if (maybe) same<typeof maybe, Lock>(true)

  const number = await locks.using('n', async () => 5)
  same<typeof number, number>(true)
  const token = await locks.using(names, all, (held) => held.fencingToken)
  same<typeof token, bigint>(true)
  const nothing = await locks.using('n', undefined, () => {})
  same<typeof nothing, void>(true)
  const thenable = await locks.using('n', {}, (): PromiseLike<string> => Promise.resolve('text'))
  same<typeof thenable, string>(true)
  await locks.using('n', async (held) => same<typeof held, Lock>(true))
}

export async function ranOrSkipped(locks: LockService) {
  const attempt = await locks.tryUsing('n', async () => {})
  same<typeof attempt, Attempt<void>>(true)
  if (attempt.ran) same<typeof attempt.value, void>(true)
  else same<typeof attempt.holder, Holder | null>(true)
  const number = await locks.tryUsing(['a', 'b'], { waitMs: '5s' }, (held) => held.fencingToken)
  return number.ran ? number.value : number.holder?.host
}

export async function durations(locks: LockService, lock: Lock) {
  const texts: Duration[] = ['250ms', '30s', '1.5m', '1h', 5, Infinity]
  await locks.acquire('n', { ttlMs: '30s', waitMs: '5m', maxHoldMs: '1h', stallLimitMs: '500ms', minHoldMs: '1s' })
  await LockService.connect('memory:', { storeTimeoutMs: '2s', defaults: { ttlMs: '1m' } })
  await lock.extend('30s')
  return texts
}

/** Methods may be detached. */
export async function detached(locks: LockService) {
  const { acquire, using, stats } = locks
  same<Awaited<ReturnType<typeof acquire>>, Lock>(true)
  same<ReturnType<typeof stats>, LockStats>(true)
  return using('n', () => 5)
}

export async function aLock(lock: Lock) {
  same<Lock['name'], string>(true)
  same<Lock['names'], string[]>(true)
  same<Lock['token'], string>(true)
  same<Lock['fencingToken'], bigint>(true)
  same<Lock['remainingMs'], number>(true)
  same<Lock['isHeld'], boolean>(true)
  same<Lock['signal'], Signal>(true)
  same<ReturnType<Lock['extend']>, Promise<void>>(true)
  same<ReturnType<Lock['release']>, Promise<boolean>>(true)
  same<ReturnType<Lock['toJSON']>, LockJson>(true)
  same<ReturnType<Lock['transferable']>, TransferableLock>(true)
  same<Lock[typeof Symbol.asyncDispose], () => Promise<void>>(true)
  await lock.extend(5)
  lock.signal.addEventListener('abort', () => {})
  lock.signal.removeEventListener('abort', () => {})
  same<typeof lock.signal.aborted, boolean>(true)
  // A lock's signal may cancel another wait.
  const options: AcquireOptions = { signal: lock.signal }
  void options
}

export async function disposed(locks: LockService) {
  await using lock = await locks.acquire('n')
  await using maybe = await locks.tryAcquire('n')
  const disposables: AsyncDisposable[] = [lock]
  return [maybe?.isHeld, disposables]
}

export async function inspecting(locks: LockService, lock: Lock) {
  const restored = [locks.restore(lock.transferable()), locks.restore(JSON.stringify(lock.transferable()))]
  same<typeof restored, Promise<Lock>[]>(true)
  const info = await locks.inspect('n')
  same<typeof info, LockInfo | null>(true)
  const lists = [locks.list(), locks.list({}), locks.list({ prefix: 'p' })]
  same<typeof lists, (Promise<LockInfo[]> & AsyncIterable<LockInfo>)[]>(true)
  for await (const listed of locks.list()) same<typeof listed, LockInfo>(true)
  const freed = await locks.forceRelease('n')
  same<typeof freed, boolean>(true)
  const stats = locks.stats()
  same<typeof stats, LockStats>(true)
  type Counter = 'held' | 'waiting' | 'acquired' | 'busy' | 'released' | 'renewed' | 'lost' | 'storeErrors'
  same<keyof LockStats, Counter>(true)
  same<LockStats[keyof LockStats], number>(true)
  same<ReturnType<LockService['close']>, Promise<void>>(true)
  await Promise.all([locks.close({ drainMs: '30s' }), locks.close({}), locks.close({ drainMs: 5 })])
  same<ReturnType<LockService['ping']>, Promise<number>>(true)
  same<ReturnType<LockService['withPrefix']>, LockService>(true)

  same<LockInfo['fencingToken'], bigint | null>(true)
  same<LockInfo['holder'], Holder | null>(true)
  same<Holder['since'], Date>(true)
  same<LockInfo['metadata'], Json>(true)
  same<LockInfo['waiting'], number | null>(true)
  same<LockJson['fencingToken'], string>(true)
}

export function events(event: LockEvent) {
  type Held = 'acquired' | 'released' | 'renewed' | 'lost'
  type Ended = 'timeout' | 'aborted' | 'failed'
  same<LockEvent['type'], Held | Ended | 'waiting' | 'connected' | 'disconnected'>(true)
  same<typeof event.names, readonly string[] | undefined>(true)
  switch (event.type) {
    case 'acquired':
      return same<typeof event.waitedMs, number>(true)
    case 'released':
      return same<typeof event.heldMs, number>(true)
    case 'lost':
      same<typeof event.heldMs, number>(true)
      return same<typeof event.reason, string>(true)
    case 'renewed':
      return same<typeof event.fencingToken, bigint>(true)
    case 'waiting':
      same<typeof event.share, Share | undefined>(true)
      return same<keyof typeof event, 'type' | 'engine' | 'name' | 'names' | 'share'>(true)
    case 'timeout':
    case 'aborted':
      return same<typeof event.waitedMs, number>(true)
    case 'failed':
      same<typeof event.reason, string>(true)
      return same<typeof event.code, 'LOCK_STORE' | 'LOCK_CLOSED'>(true)
    case 'disconnected':
      return same<typeof event.reason, string>(true)
    case 'connected':
      return same<typeof event.name, undefined>(true)
    default:
      return same<typeof event, never>(true)
  }
}

export async function failures(locks: LockService) {
  try {
    await locks.acquire('n')
  } catch (caught) {
    const error = caught as LockError
    same<typeof error.code, LockErrorCode>(true)
    same<typeof error.name, 'LockError'>(true)
    same<typeof error.retryable, boolean>(true)
    same<typeof error.key, string | undefined>(true)
    same<typeof error.engine, string | undefined>(true)
    same<typeof error.cause, unknown>(true)
    const plain: Error = error
    void plain
    switch (error.code) {
      case 'LOCK_INVALID_ARGUMENT':
      case 'LOCK_TIMEOUT':
      case 'LOCK_LOST':
      case 'LOCK_CLOSED':
      case 'LOCK_STORE':
        return true
      default:
        same<typeof error.code, never>(true)
    }
  }
}

export function narrowed(caught: unknown) {
  if (caught instanceof LockError) {
    same<typeof caught.code, LockErrorCode>(true)
    // @ts-expect-error there is no such code
    if (caught.code === 'LOCK_BUSY') return
  }
  if (isLockError(caught)) same<typeof caught.code, LockErrorCode>(true)
  if (isLockError(caught, 'LOCK_TIMEOUT')) {
    const code: 'LOCK_TIMEOUT' = caught.code
    same<typeof caught.holder, Holder | null>(true)
    same<typeof caught.remainingMs, number | null>(true)
    return [code, caught.key, caught.message]
  }
  // @ts-expect-error there is no such code
  isLockError(caught, 'LOCK_BUSY')
  return new LockError('LOCK_TIMEOUT', 'for a unit test', { key: 'n', retryable: true })
}

/** A service is an ordinary type: a parameter, a field, or a substitute in a unit test. */
export class Report {
  constructor(private readonly locks: Pick<LockService, 'acquireAndExecute'>) {}

  run = () => this.locks.acquireAndExecute('report', 60, async ({ isHeld }) => isHeld)
}

export const isLock = (value: unknown): value is Lock => value instanceof Object && 'fencingToken' in value

export async function shares(locks: LockService) {
  const semaphore: Semaphore = locks.semaphore('n', 5)
  const lock: ReadWriteLock = locks.readWriteLock('n')
  const sides: NamedLock[] = [lock.read, lock.write, semaphore]
  const options: PermitOptions = { permits: 2, ttlMs: '10s', signal, metadata: {}, onStoreError: 'wait' }
  const held = [await semaphore.acquire(options), await lock.read.acquire({ waitMs: 0 }), await lock.write.acquire()]
  same<typeof held, Lock[]>(true)
  const maybe = [await semaphore.tryAcquire({ permits: undefined }), await lock.write.tryAcquire()]
  same<typeof maybe, (Lock | null)[]>(true)
  same<Lock['permits'], number>(true)
  const anyway: PermitUsingOptions = { permits: 1, onStoreError: 'run' }
  const value = await semaphore.using(anyway, async ({ permits }) => permits)
  same<typeof value, number>(true)
  const short = await lock.read.using(() => 'text')
  same<typeof short, string>(true)
  const attempts = [await semaphore.tryUsing(() => 5), await lock.write.tryUsing(undefined, () => 5)]
  same<typeof attempts, Attempt<number>[]>(true)
  const infos = [await semaphore.inspect(), await lock.inspect()]
  same<typeof infos, SharedInfo[]>(true)
  same<SharedInfo['limit'], number | null>(true)
  same<SharedInfo['holders'], readonly PermitInfo[]>(true)
  same<PermitInfo['fencingToken'], bigint | null>(true)
  same<Share, { readonly permits: number; readonly limit: number }>(true)
  const forced: boolean[] = [await semaphore.forceRelease(), await lock.forceRelease()]
  return [sides, forced, semaphore.limit, semaphore.name, lock.name]
}

export async function elections(locks: LockService) {
  const options: ElectOptions = {
    ttlMs: '10s',
    metadata: {},
    maxLeaders: 3,
    signal,
    restart: true,
    onError: (error: unknown) => void error,
    unref: true,
  }
  const election: Election = locks.elect('n', options, async (leadership: Leadership) => {
    same<Leadership['term'], bigint>(true)
    same<Leadership['signal'], Signal>(true)
    return leadership.isLeader && leadership.remainingMs > 0
  })
  locks.elect('n', undefined, () => {})
  locks.elect('n', () => 7)
  same<Election['term'], bigint | null>(true)
  await Promise.all([election.resign(), election.stop(), election.done])
  const watching: WatchOptions = { intervalMs: '1s', signal }
  for await (const info of locks.watch('n', watching)) same<typeof info, LockInfo | null>(true)
  const once: OncePerOptions = { periodMs: '1h', ttlMs: 1, waitMs: 0, metadata: null }
  const attempt = await locks.oncePer('n', once, async (lock: Lock) => lock.name)
  same<typeof attempt, Attempt<string>>(true)
}
