// The 18:00 job, as a service would write it.
//
// The lock alone keeps two instances from doing the job at the same time. It does not keep one that comes late (a slow
// clock, a long pause) from doing it again, once the first has released. So each looks, under the lock, whether the
// report is there already; and stores it with its fencing token, so that one that lost its lease half-way cannot
// overwrite what its successor did.
import { setTimeout as sleep } from 'node:timers/promises'

export const TTL_MS = 2000
export const STEPS = 5
const WAIT_MS = 60_000
const STEP_MS = 160

/** Takes part in one round. Resolves to `'stored'`, or `'aside'` when the report was there already. */
export function report(locks, database, name) {
  return locks.using(name, { ttlMs: TTL_MS, waitMs: WAIT_MS }, async ({ fencingToken, signal }) => {
    await database.enter(name, fencingToken)
    try {
      if (await database.find(name)) return 'aside'
      await database.start(name)
      for (let step = 1; step <= STEPS; step++) {
        await sleep(STEP_MS)
        signal.throwIfAborted()
        await database.progress(name, step)
      }
      return (await database.store(name, fencingToken)) ? 'stored' : 'refused'
    } finally {
      await database.leave(name)
    }
  })
}

/** No lock at all, for `HOLDFAST_DEMO_SABOTAGE=1`: the verdict has to notice. */
export const noLocks = {
  using: (name, options, fn) => fn({ fencingToken: 0n, signal: new AbortController().signal }),
}
