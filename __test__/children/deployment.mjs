// One instance of a rolling deployment that replaces the gist: adds marks to a list that only a lock protects, until its
// input ends.
//
// The test is about the lock, not about the gist's known flaw: an instance that is suspended for longer than its ttl continues
// without a lock. Such an instance writes nothing and releases nothing here. The check and the write happen in one tick.
import { readFileSync, renameSync, writeFileSync } from 'node:fs'
import { setTimeout as sleep } from 'node:timers/promises'
import { MongoClient } from 'mongodb'
import { Gist } from '../gist.mjs'
import { open, requests, report, task } from './child.mjs'

const { name, file, ttlMs, scenario } = task
let isStopped = false
let round = 0

/** Reads, pauses, writes. Returns `false`, and writes nothing, when the lease has ended. */
async function add(isOurs) {
  const mark = `${process.pid}:${round++}`
  report({ adding: mark })
  const { count, marks } = JSON.parse(readFileSync(file, 'utf8'))
  await sleep(2 + Math.random() * 8)
  const text = JSON.stringify({ count: count + 1, marks: [...marks, mark] })
  if (!isOurs()) return false
  // The rename is atomic: a kill leaves the old list or the new one.
  writeFileSync(`${file}.${process.pid}`, text)
  renameSync(`${file}.${process.pid}`, file)
  report({ added: mark })
  return true
}

/** Returns a function that checks whether a lease requested now is still valid: the gist knows only the elapsed time. */
function stopwatch() {
  const end = performance.now() + ttlMs * 0.9
  return () => performance.now() < end
}

/** Adds one mark with the gist's functions. Polls, until this process is to stop. */
async function addByName(locks) {
  while (!isStopped) {
    const isOurs = stopwatch()
    if (await locks.acquireLock(name, ttlMs / 1000)) {
      if (await add(isOurs)) await locks.releaseLock(name)
      return
    }
    await sleep(10 + Math.random() * 20)
  }
}

const scenarios = {
  async gist() {
    const client = await MongoClient.connect(task.url)
    const gist = new Gist(client.db().collection('locks'))
    await gist.start()
    return { runOnce: () => addByName(gist), close: () => client.close() }
  },
  async acquireLock() {
    const locks = await open()
    return { runOnce: () => addByName(locks), close: () => locks.close() }
  },
  async using() {
    const locks = await open()
    const once = (lock) => add(() => lock.isHeld)
    const runOnce = () =>
      locks.using(name, { ttlMs, waitMs: 60_000 }, once).catch((error) => {
        if (error.code !== 'LOCK_LOST') throw error
      })
    return { runOnce, close: () => locks.close() }
  },
}

const { runOnce, close } = await scenarios[scenario]()
report({ ready: true })
requests().once('close', () => (isStopped = true))
while (!isStopped) {
  await runOnce()
  // A name with waiters passes from waiter to waiter. The pause gives polling instances a chance.
  await sleep(Math.random() * (scenario === 'using' ? 80 : 20))
}
await close()
