// A first waiter that is stopped or dead blocks the next one for no longer than the lease that it asked for.
import assert from 'node:assert/strict'
import { start } from './children/start.mjs'
import { suspend } from './waiter-processes.mjs'
import { KINDS, suite } from './stores.mjs'
import { until, waiting } from './tools.mjs'

const TTL_MS = 400
/** Time for a hand-off to the next waiter, beyond the lease. */
const HANDOFF_MS = 250
/** Slack for a busy machine. A single round may still be slower: the machine sometimes stands still for a second. */
const SLACK_MS = 500
const ROUNDS = 3

const median = (values) => [...values].sort((one, other) => one - other)[values.length >> 1]

/** Applies `harm` to the process of the first waiter. Resolves to the time from the release to the second waiter's grant. */
async function secondWaits(store, t, round, harm) {
  const locks = await store.connect()
  const name = `n${round}`
  const held = await locks.acquire(name, { ttlMs: 60_000 })
  const first = start(t, 'waiter', { url: store.target, options: store.options })
  await first.next('ready')
  first.send(JSON.stringify({ name, ttlMs: TTL_MS }))
  assert.equal(await first.next('waiting'), name)
  const second = locks.acquire(name, { waitMs: 60_000 })
  await waiting(locks, 1)
  await harm(first)
  const releasedAt = performance.now()
  assert.equal(await held.release(), true)
  const lock = await second
  const tookMs = performance.now() - releasedAt
  assert.equal(await lock.release(), true)
  first.kill('SIGKILL')
  await first.ended
  return tookMs
}

const HARMS = {
  stopped: suspend,
  killed: async (child) => {
    child.kill('SIGKILL')
    await child.ended
  },
}

for (const kind of Object.keys(KINDS).filter((kind) => kind !== 'memory')) {
  suite(kind, 'a first waiter with a short lease', (test) => {
    for (const [what, harm] of Object.entries(HARMS)) {
      test(`that is ${what} blocks the next one for no longer than its lease`, async (store, t) => {
        // Each round has processes of its own, so that the rounds do not help each other.
        const rounds = Array.from({ length: ROUNDS }, (_, round) => secondWaits(store, t, round, harm))
        const times = (await Promise.all(rounds)).map(Math.round)
        t.diagnostic(`ms from the release to the second waiter: ${times}`)
        const limitMs = TTL_MS + HANDOFF_MS + SLACK_MS
        assert.ok(median(times) < limitMs, `${times} ms, the limit for the median is ${limitMs} ms`)
        // A lease that the killed process got by hand-off expires by itself.
        const locks = await store.connect()
        await until('nothing is left', async () => (await locks.list()).length === 0)
      })
    }
  })
}
