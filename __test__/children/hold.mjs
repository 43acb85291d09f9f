// Holds a lock and does as it is told, until its input ends.
import { block, open, orders, say, task } from './kit.mjs'

const locks = await open()
const lock = await locks.acquire(task.names, { waitMs: 60_000, ...task.acquire })
say({ held: lock.fencingToken })

for await (const line of orders()) {
  const [verb, value] = line.split(' ')
  if (verb === 'block') {
    block(Number(value))
    say({ blocked: { isHeld: lock.isHeld, aborted: lock.signal.aborted, lost: locks.stats().lost } })
  }
  if (verb === 'release') say({ released: await lock.release() })
}
