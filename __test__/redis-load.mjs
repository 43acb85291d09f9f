// What the tests of failures of several servers share: a load with one holder per name, and the connections of a service.
import assert from 'node:assert/strict'
import { redisCommand } from '../scripts/redis-command.mjs'
import { connectionsTo } from './redis-client.mjs'
import { sleep, until } from './tools.mjs'

/**
 * Calls `using` for each name and service, again and again. `stop()` ends the load and returns the number of calls that were
 * `served` and that `failed`. It asserts that a name had one holder at a time, and with `tokensGrow` that its tokens grew.
 *
 * @param {import('../index.js').LockService[]} services
 * @param {string[]} names
 */
export function startLoad(services, names, { tokensGrow = true } = {}) {
  const counts = { served: 0, failed: 0 }
  /** @type {string[]} */
  const violations = []
  /** @type {Map<string, import('../index.js').Lock>} */
  const holders = new Map()
  /** @type {Map<string, bigint>} */
  const tokens = new Map()
  let isOver = false
  const loop = async (service, name) => {
    while (!isOver) {
      try {
        await service.using(name, { ttlMs: 4000, waitMs: 30_000 }, async (lock) => {
          if (holders.get(name)?.isHeld) violations.push(`${name} has two holders`)
          const last = tokens.get(name) ?? 0n
          if (tokensGrow && lock.fencingToken <= last) violations.push(`${name}: ${lock.fencingToken} after ${last}`)
          holders.set(name, lock)
          tokens.set(name, lock.fencingToken)
          await sleep(1)
          if (holders.get(name) === lock) holders.delete(name)
        })
        counts.served++
      } catch (error) {
        // The lease may end in an outage, and a call reject.
        if (!/^LOCK_(STORE|LOST)$/.test(error.code)) return void violations.push(`${name}: ${error.message}`)
        counts.failed++
        await sleep(10)
      }
    }
  }
  const loops = services.flatMap((service) => names.map((name) => loop(service, name)))
  const stop = async () => {
    isOver = true
    await Promise.all(loops)
    assert.deepEqual(violations, [])
    return counts
  }
  return { counts, stop }
}

/**
 * Acquires and releases a name.
 *
 * @param {import('../index.js').LockService} service
 * @param {string} name
 */
export async function pair(service, name) {
  const lock = await service.acquire(name)
  assert.equal(await lock.release(), true)
}

/**
 * Makes pairs until there is one connection to each of these servers.
 *
 * @param {{ port: number }[]} servers
 * @param {() => Promise<unknown>} pairs
 */
export const untilConnected = (servers, pairs) =>
  until('a connection to each server', async () => {
    await pairs()
    const connections = await Promise.all(servers.map(({ port }) => connectionsTo(port)))
    return connections.every((ids) => ids.length === 1)
  })

/**
 * Breaks the connection to a server.
 *
 * @param {{ port: number }} server
 */
export async function killConnection({ port }) {
  const ids = await connectionsTo(port)
  assert.equal(ids.length, 1)
  await redisCommand(port, `CLIENT KILL ID ${ids[0]}`)
  return ids[0]
}
