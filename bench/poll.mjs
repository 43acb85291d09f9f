// Waiting as people write it where a lock has no wait of its own: try, pause, try again.
import { setTimeout as sleep } from 'node:timers/promises'

/**
 * The pause. Code and libraries that wait for a lock on MongoDB take 50 to 500 ms, most of them more than this.
 */
export const USUAL_MS = 100

/** Tries until something truthy comes, and gives that. */
export async function poll(tryOnce, pauseMs = USUAL_MS) {
  for (;;) {
    const got = await tryOnce()
    if (got) return got
    await sleep(pauseMs)
  }
}
