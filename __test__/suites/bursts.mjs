// Thousands of calls at once on a store: each call is granted or rejects within its limit, and nothing is left in the store.
import assert from 'node:assert/strict'
import { start } from '../children/start.mjs'
import { leftovers } from '../leftovers.mjs'
import { suite } from '../stores.mjs'
import { until } from '../tools.mjs'

/** The fraction of the full size. The soak has bursts of the full size. */
const SCALE = Number(process.env.HOLDFAST_BURST_SCALE ?? 0.2)
const FREE_NAMES = 20_000 * SCALE
const WAITERS = 1000 * SCALE
const PROCESSES = SCALE < 1 ? 4 : 10
const STORE_TIMEOUT_MS = 5000
const WAIT_MS = 5000
/** The guarantee is one second beyond the limit. The rest is slack for a busy machine. */
const LATE_MS = 1000 + 1000
const LEFTOVER_MS = 1000 + 1000
const BYTES_PER_CALL = 2048
/** Memory that the JavaScript heap and the allocator keep after a burst of any size. */
const HEAP_BYTES = 24 * 2 ** 20
const maxKeptBytes = (calls) => calls * BYTES_PER_CALL + HEAP_BYTES

/** Runs the calls in `processes` processes at once, and checks limits, memory and leftovers of each process. */
async function burst(store, t, { scenario, count, processes = 1, limitMs }) {
  const calls = Math.ceil(count / processes)
  const limits = { storeTimeoutMs: STORE_TIMEOUT_MS, waitMs: WAIT_MS, maxKeptBytes: maxKeptBytes(calls) }
  const task = { url: store.target, options: store.options, scenario, count: calls, ...limits }
  const children = Array.from({ length: processes }, () => start(t, 'burst', task))
  for (const child of children) await child.next('ready')
  for (const child of children) child.send('go')
  const results = await Promise.all(children.map((child) => child.next('result', 85_000)))
  t.diagnostic(JSON.stringify(processes === 1 ? results[0] : results))
  await Promise.all(children.map((child) => child.next('closed')))
  await until('nothing is left', async () => (await leftovers(store)).length === 0, LEFTOVER_MS).catch(
    async (error) => {
      const left = await leftovers(store)
      throw new Error(`${left.length} keys are left after close(), for example ${JSON.stringify(left[0])}`, {
        cause: error,
      })
    },
  )
  for (const { granted, failed, slowestMs, releasesFailed, keptBytes, isHeld } of results) {
    const { LOCK_TIMEOUT = 0, LOCK_STORE = 0, ...others } = failed
    assert.deepEqual(others, {})
    assert.equal(granted + LOCK_TIMEOUT + LOCK_STORE, calls)
    assert.ok(slowestMs < limitMs + LATE_MS, `a call took ${slowestMs} ms, its limit is ${limitMs} ms`)
    assert.equal(releasesFailed, 0, 'releases that failed')
    assert.ok(isHeld, 'a renewed lease was lost')
    assert.ok(keptBytes <= limits.maxKeptBytes, `${keptBytes} bytes are kept of ${calls} calls`)
  }
  return results
}

/** The cases that every store passes. Each of them needs the machine for itself. */
export function bursts(kind) {
  suite(kind, 'bursts', { concurrency: 1 }, (test, { server }) => {
    test(`${FREE_NAMES} calls for free names at once`, async (store, t) => {
      const [{ granted }] = await burst(store, t, { scenario: 'free', count: FREE_NAMES, limitMs: STORE_TIMEOUT_MS })
      // Fewer grants would mean that the store spends its time on calls that have already been rejected.
      assert.ok(granted > FREE_NAMES / 40, `${granted} of ${FREE_NAMES} were granted`)
    })

    test(`${WAITERS} waiters for one name from one process`, (store, t) =>
      burst(store, t, { scenario: 'waiters', count: WAITERS, limitMs: Math.max(WAIT_MS, STORE_TIMEOUT_MS) }))

    if (!server && kind !== 'sqlite') return
    test(`${WAITERS} waiters for one name from ${PROCESSES} processes`, (store, t) =>
      burst(store, t, {
        scenario: 'waiters',
        count: WAITERS,
        processes: PROCESSES,
        limitMs: Math.max(WAIT_MS, STORE_TIMEOUT_MS),
      }))
  })
}
