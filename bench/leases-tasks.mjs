// What a contender's process does for the part about held leases.
import { setTimeout as sleep } from 'node:timers/promises'

/** Measures the memory of the process after a garbage collection, in bytes. The parent starts it with `--expose-gc`. */
async function memory() {
  const collectGarbage = /** @type {NodeJS.GCFunction} */ (globalThis.gc)
  for (let i = 0; i < 3; i++) {
    collectGarbage()
    await sleep(50)
  }
  const { rss, heapTotal, heapUsed } = process.memoryUsage()
  // Of the JavaScript heap only the used part counts: its total size varies.
  return { used: rss - heapTotal + heapUsed, heapUsed }
}

/** Runs `work` for each of `count` names, 100 at a time. */
async function many(count, work) {
  const done = []
  while (done.length < count) {
    const next = Array.from({ length: Math.min(100, count - done.length) }, (_, i) => `lease:${done.length + i}`)
    done.push(...(await Promise.all(next.map(work))))
  }
  return done
}

export function leases(contender) {
  const held = []
  return {
    memory,
    async hold({ count, ttlMs }) {
      // The memory of calls in flight is not part of a lease: it is allocated before the first measurement.
      await many(count, (name) => contender.pair(name))
      const before = await memory()
      held.push(...(await many(count, (name) => contender.hold(name, ttlMs))))
      return before
    },
    async watch({ ms }) {
      const cpu = process.cpuUsage()
      const start = performance.now()
      await sleep(ms)
      const { user, system } = process.cpuUsage(cpu)
      return { cpuPercent: (user + system) / 10 / (performance.now() - start), lost: contender.lost() }
    },
  }
}
