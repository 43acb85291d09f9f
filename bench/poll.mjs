// Waiting for a lock whose library cannot wait: attempt, pause, repeat.
import { setTimeout as sleep } from 'node:timers/promises'

/** The pause. Code and libraries that wait for a lock on MongoDB use 50 to 500 ms, most of them more than this. */
export const USUAL_MS = 100

/** Calls `tryOnce` until it resolves to something truthy. Resolves to that. */
export async function poll(tryOnce, pauseMs = USUAL_MS) {
  for (;;) {
    const got = await tryOnce()
    if (got) return got
    await sleep(pauseMs)
  }
}
