// Acquires, extends and releases locks without a pause, until it is killed.
import { open, report, task } from './child.mjs'

const locks = await open()
let rounds = 0
async function pair(name) {
  const lock = await locks.acquire([name, `${name}:more`], { ttlMs: task.ttlMs, waitMs: 60_000 })
  const end = performance.now() + lock.remainingMs
  try {
    await lock.extend(task.ttlMs + 1)
  } catch (error) {
    // Only a machine that stalls until the end of the lease may lose the lock.
    if (error.code !== 'LOCK_LOST' || performance.now() < end) throw error
  }
  await lock.release()
  if (++rounds === 40) report({ going: true })
}
async function run(name) {
  for (;;) {
    await pair(name).catch((error) => {
      // A busy machine may not answer in time.
      if (error.code !== 'LOCK_STORE' || !error.retryable) throw error
    })
  }
}
await Promise.all(Array.from({ length: 16 }, (_, index) => run(`${task.name}:${index % 10}`))).catch((error) => {
  report({ error: String(error) })
  process.exit(1)
})
