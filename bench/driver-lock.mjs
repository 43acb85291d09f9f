// A lock without a library, on the two commands of a driver.
import { randomBytes } from 'node:crypto'

/** The ttl of names that other processes try to acquire: longer than any part of the benchmark. */
export const HELD_TTL_MS = 1_800_000

/** Deletes a name if it has this token. */
export const FREE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"

const newToken = () => randomBytes(16).toString('hex')

/** `acquire(name, token, ttlMs)` resolves to whether it acquired the name, `free(name, token)` to 1 if the token held it. */
export function driverLock({ acquire, free, close }) {
  return {
    async pair(name) {
      const token = newToken()
      if (!(await acquire(name, token, 30_000))) throw new Error(`${name} was busy`)
      if ((await free(name, token)) !== 1) throw new Error(`${name} was lost`)
    },
    async take(name) {
      if (!(await acquire(name, newToken(), HELD_TTL_MS))) throw new Error(`${name} was busy`)
    },
    async tryHeld(name) {
      if (await acquire(name, newToken(), 30_000)) throw new Error(`${name} was not busy`)
    },
    close,
  }
}
