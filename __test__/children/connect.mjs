// Connects at a moment agreed upon, takes a lock that all the others want, too, and gives it back.
import { open, report, task } from './child.mjs'

await new Promise((resolve) => setTimeout(resolve, task.at - Date.now()))
const locks = await open()
const lock = await locks.acquire(task.name, { waitMs: 60_000 })
report({ served: lock.fencingToken })
await lock.release()
await locks.close()
