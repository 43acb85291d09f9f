// Connects at a given time, together with other processes, and acquires and releases a lock that all of them want.
import { open, report, task } from './child.mjs'

await new Promise((resolve) => setTimeout(resolve, task.at - Date.now()))
const locks = await open()
const lock = await locks.acquire(task.name, { waitMs: 60_000 })
report({ served: lock.fencingToken })
await lock.release()
await locks.close()
