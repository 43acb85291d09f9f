// The Redis client of the tests: another tool on the same server. And a server with TLS.
import { Redis } from 'ioredis'
import { redisTls } from '../scripts/certificates.mjs'
import { redisCommand } from '../scripts/redis-command.mjs'
import { startRedis } from '../scripts/servers.mjs'

/** The name of the connections of the other tool. */
const CONNECTION = 'other-tool'

/** Opens a client that ignores connection errors: tests stop and stall servers. `options` are those of ioredis. */
export function openRedis(target, options = {}) {
  const named = { connectionName: CONNECTION }
  const redis =
    typeof target === 'string' ? new Redis(target, { ...named, ...options }) : new Redis({ ...named, ...target })
  return redis.on('error', () => {})
}

/** Returns how often the server has executed each command, by its name in lower case. */
export async function commandCounts(redis) {
  const stats = await redis.info('commandstats')
  return Object.fromEntries(
    [...stats.matchAll(/^cmdstat_(\w+):calls=(\d+)/gm)].map(([, name, calls]) => [name, Number(calls)]),
  )
}

/**
 * Starts a server that listens with TLS on a second port. `secure` has its URL there, and the options to connect to it.
 *
 * @param {{ args?: string[] }} [options]
 */
export async function startRedisWithTls({ args = [] } = {}) {
  const tls = await redisTls()
  const server = await startRedis({ tls, args })
  const stop = async () => {
    await server.stop()
    await tls.remove()
  }
  const secure = { url: `rediss://127.0.0.1:${server.tlsPort}`, options: { tls: { caFile: tls.caFile } } }
  return { url: server.url, port: server.port, secure, stop }
}

/**
 * Resolves to the ids of the connections of holdfast to a server. They use RESP3 and have no name: the other connections of these tests have a name or use RESP2.
 *
 * @param {number} port its port without TLS
 */
export async function connectionsTo(port) {
  const clients = (await redisCommand(port, 'CLIENT LIST')).split('\n')
  const ours = clients.filter((line) => / name= .* resp=3\b/.test(line))
  return ours.map((line) => Number(/id=(\d+)/.exec(line)?.[1])).sort((one, other) => one - other)
}
