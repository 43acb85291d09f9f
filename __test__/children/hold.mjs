// Holds a lock and executes requests until its input ends.
import { block, open, requests, report, task } from './child.mjs'

const locks = await open()
const lock = await locks.acquire(task.names, { waitMs: 60_000, ...task.acquire })
report({ held: lock.fencingToken })

for await (const line of requests()) {
  const [verb, value] = line.split(' ')
  if (verb === 'block') {
    block(Number(value))
    report({ blocked: { isHeld: lock.isHeld, aborted: lock.signal.aborted, lost: locks.stats().lost } })
  }
  if (verb === 'release') report({ released: await lock.release() })
  if (verb === 'again')
    report({ again: (await locks.acquire(task.names, { waitMs: 60_000, ...task.acquire })).fencingToken })
}
