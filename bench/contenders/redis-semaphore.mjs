// redis-semaphore's Mutex, on several nodes its RedlockMutex; without the refresh timer where names are released at once.
import { Mutex, RedlockMutex } from 'redis-semaphore'
import { HELD_TTL_MS } from '../driver-lock.mjs'
import { openClients, settingsOf } from '../ioredis-clients.mjs'

export const kind = 'library'
export const packages = ['redis-semaphore', 'ioredis']
export const does =
  'owner check (its release does not return whether the lock was lost); no fencing token; renews on the event loop (not in the pairs)'
export const settings = settingsOf(
  'redis-semaphore',
  '`Mutex`, `RedlockMutex` on a quorum; `refreshInterval: 0`, `acquireAttemptsLimit: 1`, `retryInterval: 0`; after a failed ' +
    'try it sleeps for the retry interval even when no retry follows, which is a timer of 1 ms at the least',
)
export const holds = 'Mutex with its refresh'

export async function connect(target, variant) {
  const clients = openClients(target, variant)
  const [redis] = clients
  let lost = 0
  const once = { lockTimeout: 30_000, refreshInterval: 0, acquireAttemptsLimit: 1, retryInterval: 0 }
  const mutexOf = (name, how = once) =>
    clients.length === 1 ? new Mutex(redis, name, how) : new RedlockMutex(clients, name, how)
  const wait = async (name, retryMs) => {
    const often = retryMs === undefined ? {} : { retryInterval: retryMs }
    // By default it times out after 10 s.
    const mutex = new Mutex(redis, name, { lockTimeout: 30_000, acquireTimeout: 600_000, ...often })
    await mutex.acquire()
    return () => mutex.release()
  }
  return {
    async pair(name) {
      const mutex = mutexOf(name)
      if (!(await mutex.tryAcquire())) throw new Error(`${name} was busy`)
      await mutex.release()
    },
    take: (name) => mutexOf(name, { ...once, lockTimeout: HELD_TTL_MS }).acquire(),
    async tryHeld(name) {
      if (await mutexOf(name).tryAcquire()) throw new Error(`${name} was not busy`)
    },
    async hold(name, ttlMs) {
      const mutex = new Mutex(redis, name, { lockTimeout: ttlMs, acquireAttemptsLimit: 1, onLockLost: () => lost++ })
      await mutex.acquire()
      return mutex
    },
    wait,
    // It has no such call. The refresh is a timer for each lock.
    async using(name, work) {
      const release = await wait(name, 1)
      try {
        return await work()
      } finally {
        await release()
      }
    },
    lost: () => lost,
    close: () => Promise.all(clients.map((client) => client.quit())),
  }
}
