// Adds to counters that only a lock protects: a second holder between read and write would lose an addition.
import { readFile, writeFile } from 'node:fs/promises'
import { setTimeout as sleep } from 'node:timers/promises'
import { open, report, task } from './child.mjs'

const file = (name) => `${task.folder}/${name}`

async function add(name, fence) {
  const seen = JSON.parse(await readFile(file(name), 'utf8'))
  // A guarded resource refuses a fencing token that is not larger than the last one.
  if (fence !== undefined && fence <= BigInt(seen.fence))
    report({ error: `fencing token ${fence} after ${seen.fence}` })
  await sleep(Math.random() * 3)
  await writeFile(file(name), JSON.stringify({ count: seen.count + 1, fence: String(fence ?? seen.fence) }))
}

const pick = (names) => [...names].sort(() => Math.random() - 0.5).slice(0, 2)

const scenarios = {
  async acquire(locks) {
    const lock = await locks.acquire(task.names[0], { ttlMs: 20_000, waitMs: 120_000 })
    await add(task.names[0], lock.fencingToken)
    await lock.release()
  },
  // The gist's functions do not wait: this polls.
  async acquireLock(locks) {
    while (!(await locks.acquireLock(task.names[0], 20))) await sleep(Math.random() * 10)
    await add(task.names[0])
    if (!(await locks.releaseLock(task.names[0]))) report({ error: 'releaseLock returned false' })
  },
  async several(locks) {
    await locks.using(pick(task.names), { ttlMs: 20_000, waitMs: 120_000 }, async (lock) => {
      await Promise.all(lock.names.map((name) => add(name, lock.fencingToken)))
    })
  },
}

const lost = []
const onEvent = ({ type, heldMs, reason }) => type === 'lost' && lost.push({ heldMs, reason })
const locks = await open({ onEvent })
for (let round = 0; round < task.rounds; round++) await scenarios[task.scenario](locks)
report({ lost })
await locks.close()
