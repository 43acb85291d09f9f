// Thousands of held leases in one process: few commands renew them, and none of them is late.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { LockService } from '../index.js'
import { startRedis } from '../scripts/servers.mjs'
import { commandCounts, openRedis } from './redis-client.mjs'
import { skip } from './stores.mjs'
import { sleep, until } from './tools.mjs'

const LEASES = 10_000
const RENEWALS_EACH = 3
const TTL_MS = 9000

/** Starts a separate server, so that only this test's commands are counted. */
async function ownServer(t) {
  try {
    return await startRedis()
  } catch (error) {
    skip(t, error.message)
    return undefined
  }
}

test('renewing ten thousand leases needs at most one command per ten renewals', { timeout: 120_000 }, async (t) => {
  const server = await ownServer(t)
  if (!server) return
  const locks = await LockService.connect(server.url)
  const redis = openRedis(server.url)
  t.after(async () => {
    redis.disconnect()
    await locks.close()
    await server.stop()
  })
  const scripts = async () => {
    const { eval: texts = 0, evalsha = 0 } = await commandCounts(redis)
    return texts + evalsha
  }
  const held = await Promise.all(
    Array.from({ length: LEASES }, (_, i) => locks.acquire(`order:${i}`, { ttlMs: TTL_MS })),
  )
  // The records of the grants, which `inspect` reads, are stored a little later.
  await until('the records', async () => {
    const count = await scripts()
    await sleep(200)
    return count === (await scripts())
  })
  const before = { scripts: await scripts(), renewed: locks.stats().renewed }
  const renewed = () => locks.stats().renewed - before.renewed
  await until('the renewals', () => renewed() >= LEASES * RENEWALS_EACH, 60_000)
  const sent = (await scripts()) - before.scripts
  assert.ok(sent > 0 && sent <= renewed() / 10, `${sent} commands for ${renewed()} renewals`)
  assert.deepEqual([locks.stats().lost, locks.stats().held], [0, LEASES])
  assert.ok(held.every((lock) => lock.isHeld))
  t.diagnostic(`${renewed()} renewals, ${sent} commands`)
})
