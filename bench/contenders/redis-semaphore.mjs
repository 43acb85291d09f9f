// redis-semaphore's Mutex, without its refresh timer, which is its fastest setting for these two measurements.
import Redis from 'ioredis'
import { Mutex } from 'redis-semaphore'

export const does = 'owner check; no fencing token'

export async function connect(url) {
  const redis = new Redis(url)
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
    close: () => redis.quit(),
  }
}
