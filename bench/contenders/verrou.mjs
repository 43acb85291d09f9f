// verrou on its Redis driver. It takes part where locks are waited for.
import { Verrou } from '@verrou/core'
import { redisStore } from '@verrou/core/drivers/redis'
import Redis from 'ioredis'

export async function connect(url) {
  const redis = new Redis(url)
  const verrou = new Verrou({ default: 'redis', stores: { redis: { driver: redisStore({ connection: redis }) } } })
  return {
    async wait(name, retryMs) {
      const lock = verrou.createLock(name, 30_000)
      if (!(await lock.acquire(retryMs === undefined ? {} : { retry: { delay: retryMs } }))) throw new Error(`${name}: gave up`)
      return () => lock.release()
    },
    close: () => redis.quit(),
  }
}
