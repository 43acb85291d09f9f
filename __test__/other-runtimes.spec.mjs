// In runtimes with Node-API whose event loop is not Node's, the I/O thread polls the connection. Here they are simulated by their entry in
// `process.versions`; `npm run check:runtimes` runs Bun and Deno themselves.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { locateRedis, startRedis } from '../scripts/servers.mjs'
import { canStartServer } from './stores.mjs'
import { INDEX, output } from './tools.mjs'

let redis
let isMissing = false

before(async () => {
  if (await canStartServer({ skip: () => (isMissing = true) }, 'redis', locateRedis)) redis = await startRedis()
})
after(() => redis?.stop())

/** Runs calls in a process that seems to be a runtime. Returns the number of its connections. */
const connections = async (runtime) =>
  Number(
    await output(`
      const versions = { ...process.versions, ${JSON.stringify(runtime)}: '1.0.0' }
      Object.defineProperty(process, 'versions', { value: versions })
      const { LockService } = await import(${JSON.stringify(INDEX)})
      const locks = await LockService.connect(${JSON.stringify(redis.url)})
      for (let i = 0; i < 20; i++) await locks.using('job', (lock) => lock.isHeld)
      const { Redis } = await import('ioredis')
      const other = new Redis(${JSON.stringify(redis.url)})
      const list = await other.client('LIST')
      console.log(list.split('\\n').filter((line) => line && !/cmd=client/.test(line)).length)
      other.disconnect()
      await locks.close()
    `),
  )

for (const runtime of ['node', 'bun', 'deno', 'electron']) {
  test(`${runtime} has one connection`, async (t) => {
    if (isMissing) return t.skip('no Redis')
    assert.equal(await connections(runtime), 1)
  })
}
