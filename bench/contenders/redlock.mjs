// redlock 5 without retries, its fastest setting for free names.
import Redlock, { ExecutionError } from 'redlock'
import { HELD_TTL_MS } from '../driver-lock.mjs'
import { openClients, settingsOf } from '../ioredis-clients.mjs'

export const kind = 'library'
export const packages = ['redlock', 'ioredis']
export const does = 'owner check; no fencing token; renews in `using` only, on the event loop'
export const settings = settingsOf(
  'redlock',
  '`acquire` and `release`, `retryCount: 0`; a failed try is two scripts one after the other: the second one rolls back',
)
export const holds = 'using'

export async function connect(target, variant) {
  const redlock = new Redlock(openClients(target, variant), { retryCount: 0 })
  redlock.on('error', () => {})
  let lost = 0
  return {
    async pair(name) {
      const lock = await redlock.acquire([name], 30_000)
      // Throws when the lock was lost.
      await lock.release()
    },
    take: (name) => redlock.acquire([name], HELD_TTL_MS),
    async tryHeld(name) {
      await redlock.acquire([name], 30_000).then(
        () => {
          throw new Error(`${name} was not busy`)
        },
        (error) => {
          if (!(error instanceof ExecutionError)) throw error
        },
      )
    },
    hold: (name, ttlMs) =>
      new Promise((held, failed) => {
        const work = (signal) => new Promise(() => held(signal.addEventListener('abort', () => lost++)))
        redlock.using([name], ttlMs, work).catch(failed)
      }),
    async wait(name, retryMs) {
      const often = retryMs === undefined ? {} : { retryDelay: retryMs, retryJitter: 0 }
      // By default it fails after 10 tries, usually before it is granted the lock.
      const lock = await redlock.acquire([name], 30_000, { retryCount: -1, ...often })
      return () => lock.release()
    },
    using: (name, work) => redlock.using([name], 30_000, { retryCount: -1, retryDelay: 1, retryJitter: 0 }, work),
    lost: () => lost,
    close: () => redlock.quit(),
  }
}
