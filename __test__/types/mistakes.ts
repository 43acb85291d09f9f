// What the compiler must reject. An expectation without an error is an error itself.
import { Lock, LockService } from '../../index.js'
import type { AcquireOptions, ConnectOptions, ExecuteOptions, LockEvent, LockInfo, LockStats } from '../../index.js'

export async function connections() {
  // @ts-expect-error connect creates a service, not new
  new LockService()
  // @ts-expect-error acquire creates a lock, not new
  new Lock()
  // @ts-expect-error a target is text
  LockService.connect(5)
  // @ts-expect-error or a list of texts
  LockService.connect([5])
  // @ts-expect-error a target that is missing
  LockService.connect(undefined, {})
  // @ts-expect-error a setting may be missing
  LockService.connect({} as string | undefined)
  // @ts-expect-error null is not a target
  LockService.connect(null)
  // @ts-expect-error an unknown option
  LockService.connect('memory:', { prefix: 'p' })
  // @ts-expect-error there is a target already
  LockService.connect('memory:', { url: 'memory:' })
  // @ts-expect-error an options object is the only argument
  LockService.connect({ url: 'memory:' }, {})
  // @ts-expect-error an unknown option
  LockService.connect({ uri: 'memory:' })
  // @ts-expect-error not a URL object
  LockService.connect({ href: 5 })
  // @ts-expect-error a promise is not a target
  LockService.connect(Promise.resolve('memory:'))
  // @ts-expect-error two targets
  LockService.connect({ href: 'memory:', url: 'memory:' })
  // @ts-expect-error milliseconds are a number
  LockService.connect('memory:', { storeTimeoutMs: '5' })
  // @ts-expect-error there is no default signal
  LockService.connect('memory:', { defaults: { signal: undefined } })
  // @ts-expect-error there is no default metadata
  LockService.connect('memory:', { defaults: { metadata: 'm' } })
  // @ts-expect-error seconds are for the gist's functions only
  LockService.connect('memory:', { defaults: { ttlSeconds: 5 } })
  // @ts-expect-error an unknown TLS option
  LockService.connect('rediss://h', { tls: { rejectUnauthorized: false } })
  // @ts-expect-error there is no such event
  LockService.connect('memory:', { onEvent: ({ type }) => type === 'expired' })
  // @ts-expect-error no function
  LockService.connect('memory:', { onEvent: true })
  // @ts-expect-error a promise is not the service
  LockService.connect().acquire('n')
}

export async function calls(locks: LockService, lock: Lock, readonly: readonly string[]) {
  // @ts-expect-error a name is needed
  locks.acquireLock()
  // @ts-expect-error one name
  locks.acquireLock(['a'])
  // @ts-expect-error seconds are a number
  locks.acquireLock('n', '60')
  // @ts-expect-error no options here
  locks.acquireLock('n', { ttlSeconds: 60 })
  // @ts-expect-error busy is false, not a lock
  ;(await locks.acquireLock('n')).release()

  // @ts-expect-error fn is missing
  locks.acquireAndExecute('n')
  // @ts-expect-error fn is missing
  locks.acquireAndExecute('n', 60)
  // @ts-expect-error fn is missing
  locks.acquireAndExecute({ name: 'n' })
  // @ts-expect-error the name is missing
  locks.acquireAndExecute({ ttlSeconds: 60 }, () => {})
  // @ts-expect-error fn comes last
  locks.acquireAndExecute('n', () => {}, 60)
  // @ts-expect-error an unknown option
  locks.acquireAndExecute({ name: 'n', ttl: 60 }, () => {})
  // @ts-expect-error one name
  locks.acquireAndExecute(['a'], () => {})
  // @ts-expect-error null is no ttl
  locks.acquireAndExecute('n', null, () => {})
  // @ts-expect-error the result may be undefined
  ;(await locks.acquireAndExecute('n', () => 'text')).length
  // @ts-expect-error the result is fn's
  const wrong: Promise<number | undefined> = locks.acquireAndExecute('n', () => 'text')

  // @ts-expect-error names are texts
  locks.acquire(5)
  // @ts-expect-error names are texts
  locks.acquire(['a', 5])
  // @ts-expect-error an unknown option
  locks.acquire('n', { ttl: 5 })
  // @ts-expect-error seconds are for the gist's functions only
  locks.acquire('n', { ttlSeconds: 5 })
  // @ts-expect-error milliseconds are a number
  locks.acquire('n', { ttlMs: '5' })
  // @ts-expect-error a unit that there is not
  locks.acquire('n', { ttlMs: '5 minutes' })
  // @ts-expect-error milliseconds are no bigint
  locks.acquire('n', { waitMs: 5n })
  // @ts-expect-error true or false
  locks.acquire('n', { renew: 1 })
  // @ts-expect-error no signal
  locks.acquire('n', { signal: {} })
  // @ts-expect-error JSON has no bigint
  locks.acquire('n', { metadata: 5n })
  // @ts-expect-error JSON has no symbols
  locks.acquire('n', { metadata: Symbol('m') })
  // @ts-expect-error null are no options
  locks.acquire('n', null)
  // @ts-expect-error it may be null
  ;(await locks.tryAcquire('n')).release()

  // @ts-expect-error fn is missing
  locks.using('n')
  // @ts-expect-error fn is missing
  locks.using('n', { ttlMs: 5 })
  // @ts-expect-error fn comes last
  locks.using('n', () => {}, { ttlMs: 5 })
  // @ts-expect-error the job may have been skipped
  ;(await locks.tryUsing('n', () => 5)).value
  // @ts-expect-error fn is missing
  locks.tryUsing('n', { waitMs: 5 })
  // @ts-expect-error fn gets the lock alone
  locks.using('n', (held: Lock, more: string) => {})
  // @ts-expect-error the result is fn's
  const length: Promise<string> = locks.using('n', () => 5)

  // @ts-expect-error the limit is missing
  locks.semaphore('n')
  // @ts-expect-error a number, not an object
  locks.semaphore('n', { limit: 5 })
  // @ts-expect-error one name
  locks.semaphore(['n'], 5)
  // @ts-expect-error a read/write lock has no limit
  locks.readWriteLock('n', 5)
  // @ts-expect-error a side has no permits
  locks.readWriteLock('n').read.acquire({ permits: 2 })
  // @ts-expect-error a lock has no permits
  locks.acquire('n', { permits: 2 })
  // @ts-expect-error the name is that of the semaphore
  locks.semaphore('n', 5).acquire('n')
  // @ts-expect-error fn is missing
  locks.semaphore('n', 5).using({ permits: 2 })
  // @ts-expect-error the job may have been skipped
  ;(await locks.semaphore('n', 5).tryUsing(() => 5)).value
  // @ts-expect-error there is no job
  locks.semaphore('n', 5).acquire({ onStoreError: 'run' })
  // @ts-expect-error tryUsing runs no job without a permit
  locks.semaphore('n', 5).tryUsing({ onStoreError: 'run' }, () => {})
  // @ts-expect-error only a semaphore
  locks.using('n', { onStoreError: 'run' }, () => {})
  // @ts-expect-error a writer must be alone
  locks.readWriteLock('n').write.using({ onStoreError: 'run' }, () => {})

  // @ts-expect-error the ttl is missing
  lock.extend()
  // @ts-expect-error milliseconds are a number
  lock.extend('5')
  // @ts-expect-error a lock cannot be given another name
  lock.name = 'other'
  // @ts-expect-error a fencing token is a bigint
  const token: number = lock.fencingToken
  // @ts-expect-error it is disposed of asynchronously
  using disposed = lock
  // @ts-expect-error toJSON has no owner token
  locks.restore(lock.toJSON())
  // @ts-expect-error an unknown option
  locks.close({ drain: 5 })
  // @ts-expect-error not all of what transferable gives
  locks.restore({ names: ['n'] })
  // @ts-expect-error a name is needed
  locks.inspect()
  // @ts-expect-error it may be null
  ;(await locks.inspect('n')).holder
  // @ts-expect-error the holder may be another tool
  ;(await locks.list())[0]!.holder.host
  // @ts-expect-error options, not a prefix
  locks.list('prefix')
  // @ts-expect-error an unknown option
  locks.list({ name: 'n' })
  // @ts-expect-error there is no such method
  locks.lock('n')
  return [wrong, length, token, disposed, readonly]
}

export function readonlyParts(event: LockEvent, info: LockInfo, stats: LockStats) {
  // @ts-expect-error the fields are read-only
  event.type = 'lost'
  // @ts-expect-error not every event has a reason
  String(event.reason)
  // @ts-expect-error the fields are read-only
  info.remainingMs = 5
  // @ts-expect-error the fields are read-only
  stats.held = 0
}

// @ts-expect-error an unknown option
export const acquire: AcquireOptions = { timeoutMs: 5 }
// @ts-expect-error the name is missing
export const execute: ExecuteOptions = { ttlSeconds: 5 }
// @ts-expect-error a single text
export const connect: ConnectOptions = { keyPrefix: ['p'] }
