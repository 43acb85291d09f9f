// The 18:00 job, as a service would write it.
//
// The lock prevents that two instances do the job at the same time. It does not prevent that a late instance (a slow clock, a
// long pause) does it again after the first release. So each instance checks under the lock whether the report exists, and
// stores it with its fencing token, so that an instance that lost its lease cannot overwrite the next one's report.
import { setTimeout as sleep } from 'node:timers/promises'

export const TTL_MS = 2000
export const STEPS = 5
const WAIT_MS = 60_000
const STEP_MS = 160

/** Runs one round. Resolves to `'stored'`, to `'aside'` when the report existed, or to `'refused'`. */
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

/** Ignores the lock, for `HOLDFAST_DEMO_SABOTAGE=1`: the verdict must fail. */
export const noLocks = {
  using: (name, options, fn) => fn({ fencingToken: 0n, signal: new AbortController().signal }),
}
