// Under `exactOptionalPropertyTypes`: `undefined` counts as absent, so it is accepted.
import { LockService, type ConnectOptions, type SignalLike } from '../../index.js'

interface Maybe {
  signal?: SignalLike | undefined
  ttl: number | undefined
}

export async function passedOn(locks: LockService, maybe: Maybe) {
  await locks.acquire('n', { signal: maybe.signal, ttlMs: maybe.ttl, waitMs: maybe.ttl, metadata: undefined })
  await locks.acquireAndExecute({ name: 'n', signal: maybe.signal, ttlSeconds: maybe.ttl }, () => {})
  await locks.list({ prefix: undefined })
  await locks.close({ drainMs: undefined })
  const defaults: ConnectOptions['defaults'] = { ttlMs: maybe.ttl }
  const options: ConnectOptions = { keyPrefix: undefined, tls: undefined, onEvent: undefined, defaults }
  // @ts-expect-error a target that is present must not be undefined
  void LockService.connect({ url: undefined, ...options })
  await LockService.connect({ ...options, tls: { caFile: undefined, insecure: undefined } })
}
