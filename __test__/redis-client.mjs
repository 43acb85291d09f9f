// The Redis client of the tests: another tool on the same server.
import { Redis } from 'ioredis'

/** Opens a client that ignores connection errors: tests stop and stall servers. `options` are those of ioredis. */
export function openRedis(target, options = {}) {
  const redis = typeof target === 'string' ? new Redis(target, options) : new Redis(target)
  return redis.on('error', () => {})
}

/** Returns how often the server has executed each command, by its name in lower case. */
export async function commandCounts(redis) {
  const stats = await redis.info('commandstats')
  return Object.fromEntries(
    [...stats.matchAll(/^cmdstat_(\w+):calls=(\d+)/gm)].map(([, name, calls]) => [name, Number(calls)]),
  )
}
