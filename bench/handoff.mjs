// Hand-offs on Redis.
//
//   npm run bench:handoff               writes bench/results-handoff.md
//   npm run bench:handoff -- --quick    a smoke test: every contender works
//
// Uses the addon in NAPI_RS_NATIVE_LIBRARY_PATH if set.
import { Monitor } from '../scripts/monitor.mjs'
import { startRedis } from '../scripts/servers.mjs'
import { measureHandOffs, prepare, quick } from './measure-handoffs.mjs'
import { serverVersion } from './report.mjs'

/** `retryMs`: 1 ms is the shortest timer in Node. */
const CONTENDERS = [
  { module: 'holdfast', setting: 'default' },
  { module: 'redlock', setting: 'default: tries every 100 to 300 ms' },
  { module: 'redlock', setting: 'tries every 10 ms', retryMs: 10 },
  { module: 'redlock', setting: 'tries every ms', retryMs: 1 },
  { module: 'redis-semaphore', setting: 'default: tries every 10 ms' },
  { module: 'redis-semaphore', setting: 'tries every ms', retryMs: 1 },
  { module: 'verrou', setting: 'default: tries every 250 ms' },
  { module: 'verrou', setting: 'tries every ms', retryMs: 1 },
].filter(({ module, retryMs }) => !quick || module === 'holdfast' || retryMs === 1)

await prepare()
const { Redis } = await import('ioredis')
const server = await startRedis()
const redis = new Redis(server.url)

const store = {
  url: server.url,
  version: await serverVersion('redis', server.url),
  packages: ['ioredis', 'redlock', 'redis-semaphore', '@verrou/core'],
  probe: 'PING of ioredis',
  ping: () => redis.ping(),
  reset: () => redis.flushall(),
  async count() {
    const monitor = await Monitor.open(server.port)
    return async () => {
      monitor.close()
      return monitor.commands.length
    }
  },
  counted:
    'Commands are those that clients send, including the one with which the last holder waits again. Commands inside ' +
    'scripts are not counted.',
}
await measureHandOffs({ store, contenders: CONTENDERS, file: 'results-handoff.md' })
redis.disconnect()
await server.stop()
