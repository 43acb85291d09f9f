// A first waiter that is suspended or dead blocks the next waiter for no longer than its ttl, and an event loop that hangs not much longer.
import assert from 'node:assert/strict'
import { start } from './children/start.mjs'
import { suspend } from './waiter-processes.mjs'
import { KINDS, suite } from './stores.mjs'
import { stopwatch, until, waiting } from './tools.mjs'

const TTL_MS = 400
/** The hand-off, on a busy machine that may stall for a second. A process without heartbeats counts as dead after 4.5 s. */
const SLACK_MS = 2500

/** Applies `fault` to the process of the first waiter. Resolves to the time, without stalls of this process, from the release to the second waiter's grant. */
async function measureHandOff(store, t, fault) {
  const locks = await store.connect()
  const held = await locks.acquire('n', { ttlMs: 60_000 })
  const first = start(t, 'waiter', { url: store.target, options: store.options })
  await first.next('ready')
  first.send(JSON.stringify({ name: 'n', ttlMs: TTL_MS }))
  assert.equal(await first.next('waiting'), 'n')
  const second = locks.acquire('n', { waitMs: 60_000 })
  await waiting(locks, 1)
  await fault(first)
  const elapsedMs = stopwatch()
  assert.equal(await held.release(), true)
  const lock = await second
  const tookMs = elapsedMs()
  assert.equal(await lock.release(), true)
  first.kill('SIGKILL')
  await first.ended
  return tookMs
}

const FAULTS = {
  suspended: suspend,
  killed: async (child) => {
    child.kill('SIGKILL')
    await child.ended
  },
}

for (const kind of Object.keys(KINDS).filter((kind) => kind !== 'memory')) {
  suite(kind, 'a first waiter with a short ttl', (test) => {
    for (const [what, fault] of Object.entries(FAULTS)) {
      test(`that is ${what} blocks the next waiter for no longer than its ttl`, async (store, t) => {
        store.useShortSessions()
        const tookMs = await measureHandOff(store, t, fault)
        t.diagnostic(`${tookMs} ms from the release to the second waiter`)
        const limitMs = Math.max(TTL_MS, store.deadMs ?? 0) + SLACK_MS
        assert.ok(tookMs < limitMs, `${tookMs} ms, the limit is ${limitMs} ms`)
        // The lease that the dead process got by hand-off expires.
        const locks = await store.connect()
        await until('nothing is left', async () => (await locks.list()).length === 0)
      })
    }

    test('of an event loop that hangs is not renewed until stallLimitMs', async (store, t) => {
      const [locks, holder] = await store.connectAll(2)
      const hung = start(t, 'waiter', { url: store.target, options: store.options })
      await hung.next('ready')
      const held = await holder.acquire('n', { ttlMs: 60_000 })
      for (let waiter = 0; waiter < 3; waiter++) {
        hung.send(JSON.stringify({ name: 'n', ttlMs: 3000 }))
        assert.equal(await hung.next('waiting'), 'n')
      }
      const second = locks.acquire('n', { waitMs: 60_000 })
      await waiting(locks, 1)
      hung.send(JSON.stringify({ hangMs: 60_000 }))
      await hung.next('hangs')
      const elapsedMs = stopwatch()
      assert.equal(await held.release(), true)
      const lock = await second
      const tookMs = elapsedMs()
      t.diagnostic(`${tookMs} ms from the release to the live waiter, behind three with a ttl of 3000 ms`)
      // Its last heartbeat counts for 4.5 s, and a lease that it got then ends 3 s later.
      assert.ok(tookMs < 12_000, `${tookMs} ms`)
      await lock.release()
      hung.kill('SIGKILL')
      await hung.ended
      // On a store without a queue the live waiter may be served first, and after it a hung one, which has just stopped.
      await until('nothing is left', async () => (await locks.list()).length === 0)
    })
  })
}
