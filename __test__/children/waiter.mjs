// Starts a waiter on each request. Reports when each one is in the queue and when it is served. `hangMs` blocks the event loop.
import { block, open, requests, report } from './child.mjs'

const locks = await open({ onEvent: ({ type, name }) => type === 'waiting' && report({ waiting: name }) })
const releases = []
report({ ready: true })

for await (const request of requests()) {
  const { name, label, hangMs = 0, ...options } = JSON.parse(request)
  if (hangMs > 0) {
    report({ hangs: true })
    block(hangMs)
    continue
  }
  locks.acquire(name, { waitMs: 60_000, ...options }).then(
    (lock) => {
      // The clock of the machine, which all its processes share.
      const at = process.hrtime.bigint()
      report({ served: { label, fence: lock.fencingToken, at } })
      releases.push(lock.release())
    },
    (error) => report({ error: String(error) }),
  )
}
// Waits that have not ended stay in the queue, but a lock that was granted must not stay held.
await Promise.all(releases)
process.exit()
