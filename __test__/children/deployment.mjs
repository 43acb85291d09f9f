// One instance of a fleet in which the gist is being replaced: adds marks to a list that has no protection but a lock,
// until it is told to stop.
//
// The lock is what is tried here, not the gist's own fault, that an instance which stands still for longer than its ttl
// goes on all the same: such an instance writes nothing, and frees nothing. The look and the write are one piece, with
// nothing in between that could wait.
import { readFileSync, renameSync, writeFileSync } from 'node:fs'
import { setTimeout as sleep } from 'node:timers/promises'
import { MongoClient } from 'mongodb'
import { Gist } from '../gist.mjs'
import { open, requests, report, task } from './child.mjs'

const { name, file, ttlMs, way } = task
let isOver = false
let round = 0

/** Reads, pauses, writes. `false`: the lock is none any more, and nothing was written. */
async function add(isOurs) {
  const mark = `${process.pid}:${round++}`
  report({ adding: mark })
  const { count, marks } = JSON.parse(readFileSync(file, 'utf8'))
  await sleep(2 + Math.random() * 8)
  const text = JSON.stringify({ count: count + 1, marks: [...marks, mark] })
  if (!isOurs()) return false
  // A kill leaves the old list or the new one, never half of one.
  writeFileSync(`${file}.${process.pid}`, text)
  renameSync(`${file}.${process.pid}`, file)
  report({ added: mark })
  return true
}

/** Whether a lease that was asked for just now lasts: the gist has no better way to know. */
function stopwatch() {
  const end = performance.now() + ttlMs * 0.9
  return () => performance.now() < end
}

/** The gist has no other way to wait than to ask again, and waits for nobody when it is told to stop. */
async function byName(locks) {
  while (!isOver) {
    const isOurs = stopwatch()
    if (await locks.acquireLock(name, ttlMs / 1000)) {
      if (await add(isOurs)) await locks.releaseLock(name)
      return
    }
    await sleep(10 + Math.random() * 20)
  }
}

const ways = {
  async gist() {
    const client = await MongoClient.connect(task.url)
    const gist = new Gist(client.db().collection('locks'))
    await gist.start()
    return { turn: () => byName(gist), close: () => client.close() }
  },
  async acquireLock() {
    const locks = await open()
    return { turn: () => byName(locks), close: () => locks.close() }
  },
  async using() {
    const locks = await open()
    const once = (lock) => add(() => lock.isHeld)
    const turn = () =>
      locks.using(name, { ttlMs, waitMs: 60_000 }, once).catch((error) => {
        if (error.code !== 'LOCK_LOST') throw error
      })
    return { turn, close: () => locks.close() }
  },
}

const { turn, close } = await ways[way]()
report({ ready: true })
requests().once('close', () => (isOver = true))
while (!isOver) {
  await turn()
  // A name that somebody of ours waits for goes on to that one: whoever only asks now and then needs a gap.
  await sleep(Math.random() * (way === 'using' ? 80 : 20))
}
await close()
