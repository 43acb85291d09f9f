// Checks its own lock in a loop, and reports what the first check after a suspension finds.
import { open, report, task } from './child.mjs'

const locks = await open()
const lock = await locks.acquire(task.name, { ttlMs: task.ttlMs })
const { signal } = lock
let abortEvents = 0
signal.addEventListener('abort', () => abortEvents++)

// Each variant reads another property first: no property may depend on an earlier read of another one.
const checks = {
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
const first = checks[task.check]

let last = performance.now()
let isDone = false
function check() {
  const now = performance.now()
  // The test resumes this process when another process has the lock: a little less than a ttl after the suspension.
  if (now - last > task.ttlMs / 2) {
    const found = first()
    isDone = true
    report({ found: { ...found, abortEvents, remainingMs: lock.remainingMs } })
  }
  last = now
}

report({ held: lock.fencingToken })

const tick = (wait) => new Promise((resolve) => wait(resolve))
const loops = {
  async interval() {
    const timer = setInterval(check, 5)
    while (!isDone) await tick((resolve) => setTimeout(resolve, 20))
    clearInterval(timer)
  },
  async immediate() {
    for (; !isDone; check()) await tick(setImmediate)
  },
  async microtasks() {
    for (; !isDone; check()) await null
  },
  busy() {
    while (!isDone) check()
  },
}
await loops[task.loop]()
// Time for the clean-up, which must not touch the next holder's lock.
await tick((resolve) => setTimeout(resolve, 300))
