// Starts a waiter on each request. Reports when each one is in the queue and when it is served.
import { open, requests, report } from './child.mjs'

const locks = await open({ onEvent: ({ type, name }) => type === 'waiting' && report({ waiting: name }) })
report({ ready: true })

for await (const request of requests()) {
  const { name, label, ...options } = JSON.parse(request)
  locks.acquire(name, { waitMs: 60_000, ...options }).then(
    async (lock) => {
      report({ served: { label, fence: lock.fencingToken } })
      await lock.release()
    },
    (error) => report({ error: String(error) }),
  )
}
process.exit()
