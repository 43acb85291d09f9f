// Thousands of held leases in one process: renewed together, in few commands, and none of them late.
import assert from 'node:assert/strict'
import net from 'node:net'
import { test } from 'node:test'
import { LockService } from '../index.js'
import { startRedis } from '../scripts/servers.mjs'
import { until } from './tools.mjs'

const LEASES = 10_000
const RENEWALS_EACH = 3
const TTL_MS = 9000

/** A server of its own, so that nobody else's commands are among those that are counted. */
async function ownServer(t) {
  try {
    return await startRedis()
  } catch (error) {
    if (process.env.CI) throw error
    t.skip(error.message)
    return undefined
  }
}

/** How often a server was asked for a script. */
function scripts(url) {
  return new Promise((resolve, reject) => {
    const { hostname, port } = new URL(url)
    const socket = net.connect({ host: hostname, port: Number(port) })
    let answer = ''
    socket.setEncoding('utf8').on('data', (data) => (answer += data))
    socket.once('error', reject)
    socket.once('close', () => {
      const calls = [...answer.matchAll(/^cmdstat_eval(?:sha)?:calls=(\d+)/gm)]
      resolve(calls.reduce((sum, [, count]) => sum + Number(count), 0))
    })
    socket.write('INFO commandstats\r\nQUIT\r\n')
  })
}

test('ten thousand leases renew with at most a tenth of as many commands', { timeout: 120_000 }, async (t) => {
  const server = await ownServer(t)
  if (!server) return
  const locks = await LockService.connect(server.url)
  t.after(async () => {
    await locks.close()
    await server.stop()
  })
  const held = await Promise.all(Array.from({ length: LEASES }, (_, i) => locks.acquire(`order:${i}`, { ttlMs: TTL_MS })))
  const before = { scripts: await scripts(server.url), renewed: locks.stats().renewed }
  const renewed = () => locks.stats().renewed - before.renewed
  await until('the renewals', () => renewed() >= LEASES * RENEWALS_EACH, 60_000)
  const asked = (await scripts(server.url)) - before.scripts
  assert.ok(asked > 0 && asked <= renewed() / 10, `${asked} commands for ${renewed()} renewals`)
  assert.deepEqual([locks.stats().lost, locks.stats().held], [0, LEASES])
  assert.ok(held.every((lock) => lock.isHeld))
  t.diagnostic(`${renewed()} renewals, ${asked} commands`)
})
