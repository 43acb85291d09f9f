// The daily report, safe to start on every instance at 18:00, early, late, or twice.
//
//   node examples/scheduled-job.mjs FOLDER        in several terminals at once; the report of the day goes to FOLDER
//
// The locks are in the store that HOLDFAST_URL names, else in the embedded one, which this machine's processes share.
import { mkdir, readFile, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { LockService } from '../index.js' // from 'holdfast' in a project of your own

const folder = process.argv[2] ?? 'reports'
const day = new Date().toISOString().slice(0, 10)
const file = join(folder, `${day}.json`)

const locks = await LockService.connect()
await mkdir(folder, { recursive: true })

// Every instance waits for its turn, so that one takes over should the first die in the middle of the job.
const options = { ttlMs: 30_000, waitMs: 120_000 }
const outcome = await locks.using(`report:${day}`, options, async ({ fencingToken, signal }) => {
  // The lock alone would let an instance with a slow clock do it all again, once the first has released.
  const earlier = await readFile(file, 'utf8').catch(() => undefined)
  if (earlier) return `stood aside: process ${JSON.parse(earlier).pid} made the report`

  const total = await addUp(signal)
  // 'wx': never over a report that is there already.
  const report = { day, total, pid: process.pid, fencingToken: String(fencingToken) }
  await writeFile(file, JSON.stringify(report), { flag: 'wx' })
  return `made the report: ${total}`
})
console.log(`${process.pid} ${outcome}`)
await locks.close()

/** The work. It ends early when the lease is lost: by then another instance may be at it. */
async function addUp(signal) {
  let total = 0
  for (let hour = 0; hour < 24; hour++) {
    signal.throwIfAborted()
    total += await new Promise((resolve) => setTimeout(resolve, 20, hour))
  }
  return total
}
