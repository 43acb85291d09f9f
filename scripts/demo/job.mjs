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

/**
 * Runs one round. Resolves to `'stored'`, to `'aside'` when the report existed, or to `'refused'`.
 *
 * @typedef {{
 *   enter(name: string, token: bigint): Promise<void>,
 *   find(name: string): Promise<boolean>,
 *   start(name: string): Promise<void>,
 *   progress(name: string, step: number): Promise<void>,
 *   store(name: string, token: bigint): Promise<boolean>,
 *   leave(name: string): Promise<void>,
 * }} Reports
 * @param {Pick<import('../../index.js').LockService, 'using'>} locks
 * @param {Reports} database
 * @param {string} name
 */
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

/**
 * Ignores the lock, for `HOLDFAST_DEMO_SABOTAGE=1`: the verdict must fail.
 *
 * @type {{ using: any }}
 */
export const noLocks = {
  using: (
    /** @type {string} */ _name,
    /** @type {object} */ _options,
    /** @type {(lock: { fencingToken: bigint, signal: AbortSignal }) => unknown} */ fn,
  ) => fn({ fencingToken: 0n, signal: new AbortController().signal }),
}
