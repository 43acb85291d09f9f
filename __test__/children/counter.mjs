// Adds to counters that have no protection but a lock: whoever reads while somebody else is about to write loses one.
import { readFile, writeFile } from 'node:fs/promises'
import { setTimeout as sleep } from 'node:timers/promises'
import { open, report, task } from './child.mjs'

const file = (name) => `${task.folder}/${name}`

async function add(name, fence) {
  const seen = JSON.parse(await readFile(file(name), 'utf8'))
  // The fence of an earlier holder must not be larger: that would be a token that a guarded store had to refuse.
  if (fence !== undefined && fence <= BigInt(seen.fence)) report({ error: `fence ${fence} after ${seen.fence}` })
  await sleep(Math.random() * 3)
  await writeFile(file(name), JSON.stringify({ count: seen.count + 1, fence: String(fence ?? seen.fence) }))
}

const pick = (names) => [...names].sort(() => Math.random() - 0.5).slice(0, 2)

const ways = {
  async acquire(locks) {
    const lock = await locks.acquire(task.names[0], { ttlMs: 20_000, waitMs: 120_000 })
    await add(task.names[0], lock.fencingToken)
    await lock.release()
  },
  // The gist has no other way to wait.
  async acquireLock(locks) {
    while (!(await locks.acquireLock(task.names[0], 20))) await sleep(Math.random() * 10)
    await add(task.names[0])
    if (!(await locks.releaseLock(task.names[0]))) report({ error: 'releaseLock freed nothing' })
  },
  async several(locks) {
    await locks.using(pick(task.names), { ttlMs: 20_000, waitMs: 120_000 }, async (lock) => {
      await Promise.all(lock.names.map((name) => add(name, lock.fencingToken)))
    })
  },
}

const locks = await open()
for (let round = 0; round < task.rounds; round++) await ways[task.way](locks)
report({ lost: locks.stats().lost })
await locks.close()
