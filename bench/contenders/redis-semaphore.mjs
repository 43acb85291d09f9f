// redis-semaphore's Mutex, without its refresh timer, which is its fastest setting for these two measurements.
import Redis from 'ioredis'
import { Mutex } from 'redis-semaphore'

export const does = 'owner check; no fencing token'
export const holds = 'Mutex with its refresh'

export async function connect(url) {
  const redis = new Redis(url)
  let lost = 0
  const options = { lockTimeout: 30_000, refreshInterval: 0, acquireAttemptsLimit: 1 }
  return {
    async pair(name) {
      const mutex = new Mutex(redis, name, options)
      if (!(await mutex.tryAcquire())) throw new Error(`${name} was busy`)
      await mutex.release()
    },
    async tryHeld(name) {
      if (await new Mutex(redis, name, options).tryAcquire()) throw new Error(`${name} was not busy`)
    },
    async hold(name, ttlMs) {
      const mutex = new Mutex(redis, name, { lockTimeout: ttlMs, acquireAttemptsLimit: 1, onLockLost: () => lost++ })
      await mutex.acquire()
      return mutex
    },
    async wait(name, retryMs) {
      const often = retryMs === undefined ? {} : { retryInterval: retryMs }
      // Its default gives up after 10 s.
      const mutex = new Mutex(redis, name, { lockTimeout: 30_000, acquireTimeout: 600_000, ...often })
      await mutex.acquire()
      return () => mutex.release()
    },
    lost: () => lost,
    close: () => redis.quit(),
  }
}
