// Transfers a lock to another process: one process acquires it, the other one restores and releases it.
//
//   node examples/transfer.mjs
//
// Uses the store in HOLDFAST_URL, by default the embedded store, which all processes of this user on this machine share.
import { fork } from 'node:child_process'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'
import { LockService } from '../index.js' // 'holdfast' in your project

const locks = await LockService.connect()
// Only the child process has a channel to its parent.
if (process.send) await successor()
else await predecessor()

async function predecessor() {
  const name = `upload:${process.pid}`
  const lock = await locks.acquire(name, { ttlMs: 10_000 })
  console.log(`${process.pid} acquired ${name}, fencing token ${lock.fencingToken}`)
  const child = fork(fileURLToPath(import.meta.url))
  // The child needs JSON.stringify(lock.transferable()) only. Treat it as a secret: it gives the right to the lock.
  child.send(JSON.stringify(lock.transferable()))
  // From here on the lock belongs to the child: this process does not use it any more.
  const [status] = await once(child, 'exit')
  const isFree = (await locks.inspect(name)) === null
  console.log(`${process.pid} sees that it is ${isFree ? 'free' : 'busy'}`)
  await locks.close()
  process.exitCode = status === 0 && isFree ? 0 : 1
}

async function successor() {
  const [json] = await once(process, 'message')
  const lock = await locks.restore(json)
  console.log(`${process.pid} restored it, fencing token ${lock.fencingToken}`)
  console.log(`${process.pid} released it: ${await lock.release()}`)
  await locks.close()
  process.disconnect()
}
