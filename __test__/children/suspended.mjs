// Watches its own lock from a loop, and says what the first line that runs after a gap in time finds.
import { open, report, task } from './child.mjs'

const locks = await open()
const lock = await locks.acquire(task.name, { ttlMs: task.ttlMs })
const { signal } = lock
let heard = 0
signal.addEventListener('abort', () => heard++)

// Each looks at one thing first: no look may depend on another one before it.
const looks = {
  isHeld: () => ({ isHeld: lock.isHeld, aborted: signal.aborted, code: signal.reason?.code }),
  aborted: () => ({ aborted: signal.aborted, code: signal.reason?.code, isHeld: lock.isHeld }),
  reason: () => ({ code: signal.reason?.code, aborted: signal.aborted, isHeld: lock.isHeld }),
  throwIfAborted() {
    let code
    try {
      signal.throwIfAborted()
    } catch (error) {
      code = error.code
    }
    return { code, aborted: signal.aborted, isHeld: lock.isHeld }
  },
}
const first = looks[task.look]

let last = performance.now()
let over = false
function look() {
  const now = performance.now()
  // The test ends the gap when somebody else has got the lock: a little less than a ttl after it began.
  if (now - last > task.ttlMs / 2) {
    const found = first()
    over = true
    report({ found: { ...found, heard, remainingMs: lock.remainingMs } })
  }
  last = now
}

report({ held: lock.fencingToken })

const tick = (wait) => new Promise((resolve) => wait(resolve))
const loops = {
  async interval() {
    const timer = setInterval(look, 5)
    while (!over) await tick((resolve) => setTimeout(resolve, 20))
    clearInterval(timer)
  },
  async immediate() {
    for (; !over; look()) await tick(setImmediate)
  },
  async microtasks() {
    for (; !over; look()) await null
  },
  busy() {
    while (!over) look()
  },
}
await loops[task.loop]()
// Time for a clean-up that must not touch the successor's lock.
await tick((resolve) => setTimeout(resolve, 300))
