// Stands in line as often as it is told to, and says when each one is in line and when it was served.
import { open, requests, report } from './child.mjs'

const locks = await open({ onEvent: ({ type, name }) => type === 'waiting' && report({ waiting: name }) })
report({ ready: true })

for await (const order of requests()) {
  const { name, as, ...options } = JSON.parse(order)
  locks.acquire(name, { waitMs: 60_000, ...options }).then(
    async (lock) => {
      report({ served: { as, fence: lock.fencingToken } })
      await lock.release()
    },
    (error) => report({ error: String(error) }),
  )
}
process.exit()
