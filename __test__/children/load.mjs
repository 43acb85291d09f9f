// Takes, extends and gives back locks without a pause, until it is killed.
import { open, report, task } from './child.mjs'

const locks = await open()
let turns = 0
async function turn(name) {
  for (;;) {
    const lock = await locks.acquire([name, `${name}:more`], { ttlMs: task.ttlMs, waitMs: 60_000 })
    const end = performance.now() + lock.remainingMs
    try {
      await lock.extend(task.ttlMs + 1)
    } catch (error) {
      // A machine that stands still until the end of the lease takes the lock away, and nothing else does.
      if (error.code !== 'LOCK_LOST' || performance.now() < end) throw error
    }
    await lock.release()
    if (++turns === 40) report({ going: true })
  }
}
await Promise.all(Array.from({ length: 16 }, (_, index) => turn(`${task.name}:${index % 10}`))).catch((error) => {
  report({ error: String(error) })
  process.exit(1)
})
