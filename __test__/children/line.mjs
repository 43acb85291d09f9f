// Stands in line as often as it is told to, and says when each one is in line and when it was served.
import { open, orders, say } from './kit.mjs'

const locks = await open({ onEvent: ({ type, name }) => type === 'waiting' && say({ waiting: name }) })
say({ ready: true })

for await (const order of orders()) {
  const { name, as, ...options } = JSON.parse(order)
  locks.acquire(name, { waitMs: 60_000, ...options }).then(
    async (lock) => {
      say({ served: { as, fence: lock.fencingToken } })
      await lock.release()
    },
    (error) => say({ error: String(error) }),
  )
}
process.exit()
