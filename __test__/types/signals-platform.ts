// With the platform's AbortSignal, options accept it, and a lock's signal has this type.
import { LockService, type AcquireOptions, type Lock, type Signal } from '../../index.js'

type Equal<A, B> = (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false
declare function same<A, B>(equal: Equal<A, B>): void

same<Signal, AbortSignal>(true)
same<Lock['signal'], AbortSignal>(true)

export async function signals(locks: LockService, lock: Lock) {
  const controller = new AbortController()
  const options: AcquireOptions = { signal: controller.signal }
  await locks.acquire('n', { signal: AbortSignal.timeout(5) })
  await locks.tryAcquire('n', options)
  await locks.using('n', { signal: AbortSignal.abort() }, async ({ signal }) => fetch('http://localhost', { signal }))
  await locks.acquireAndExecute({ name: 'n', signal: lock.signal }, async ({ signal }) => signal.throwIfAborted())
  lock.signal.addEventListener('abort', () => {}, { once: true })
  await LockService.connect(new URL('memory:'))
  await LockService.connect({ url: new URL('memory:') })
  const reason: unknown = lock.signal.reason
  return reason
}
