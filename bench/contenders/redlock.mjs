// redlock 5 on one node, without retries, which is its fastest setting for these two measurements.
import Redis from 'ioredis'
import Redlock from 'redlock'

export const does = 'owner check; no fencing token'
export const holds = 'using'

export async function connect(url) {
  const redis = new Redis(url)
  const redlock = new Redlock([redis], { retryCount: 0 })
  redlock.on('error', () => {})
  let lost = 0
  return {
    async pair(name) {
      const lock = await redlock.acquire([name], 30_000)
      await lock.release()
    },
    async tryHeld(name) {
      await redlock.acquire([name], 30_000).then(
        () => {
          throw new Error(`${name} was not busy`)
        },
        () => {},
      )
    },
    hold: (name, ttlMs) =>
      new Promise((held, failed) => {
        const work = (signal) => new Promise(() => held(signal.addEventListener('abort', () => lost++)))
        redlock.using([name], ttlMs, work).catch(failed)
      }),
    async wait(name, retryMs) {
      const often = retryMs === undefined ? {} : { retryDelay: retryMs, retryJitter: 0 }
      // Its default gives up after 10 tries, most often before its turn has come.
      const lock = await redlock.acquire([name], 30_000, { retryCount: -1, ...often })
      return () => lock.release()
    },
    lost: () => lost,
    close: () => redlock.quit(),
  }
}
