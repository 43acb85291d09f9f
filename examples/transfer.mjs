// A lock that outlives the process that took it: one process takes it, another one goes on with it and releases it.
//
//   node examples/hand-over.mjs
//
// The locks are in the store that HOLDFAST_URL names, else in the embedded one, which this machine's processes share.
import { fork } from 'node:child_process'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'
import { LockService } from '../index.js' // from 'holdfast' in a project of your own

const locks = await LockService.connect()
// The parent has a channel to whoever started it by `fork` only.
if (process.send) await successor()
else await predecessor()

async function predecessor() {
  const name = `upload:${process.pid}`
  const lock = await locks.acquire(name, { ttlMs: 10_000 })
  console.log(`${process.pid} took ${name}, fencing token ${lock.fencingToken}`)
  const child = fork(fileURLToPath(import.meta.url))
  // JSON.stringify(lock) is all that it needs. Whoever has it may release the lock: treat it as a secret.
  child.send(JSON.stringify(lock))
  // From here on the lock is the child's: no more use of it in this process.
  const [status] = await once(child, 'exit')
  const isFree = (await locks.inspect(name)) === null
  console.log(`${process.pid} sees that it is ${isFree ? 'free' : 'busy'}`)
  await locks.close()
  process.exitCode = status === 0 && isFree ? 0 : 1
}

async function successor() {
  const [json] = await once(process, 'message')
  const lock = await locks.restore(json)
  console.log(`${process.pid} goes on with it, fencing token ${lock.fencingToken}`)
  console.log(`${process.pid} released it: ${await lock.release()}`)
  await locks.close()
  process.disconnect()
}
