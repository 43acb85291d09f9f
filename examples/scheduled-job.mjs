// A daily report that may be started on every instance at 18:00, early, late, or twice.
//
//   node examples/scheduled-job.mjs FOLDER        in several terminals at once; writes the report of the day to FOLDER
//
// Uses the store in HOLDFAST_URL, by default the embedded store, which all processes of this user on this machine share.
import { mkdir, readFile, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { LockService } from '../index.js' // 'holdfast' in your project

const folder = process.argv[2] ?? 'reports'
const day = new Date().toISOString().slice(0, 10)
const file = join(folder, `${day}.json`)

const locks = await LockService.connect()
await mkdir(folder, { recursive: true })

// Every instance waits, so that another one does the job if the first one dies.
const options = { ttlMs: 30_000, waitMs: 120_000 }
const outcome = await locks.using(`report:${day}`, options, async ({ fencingToken, signal }) => {
  // The lock alone does not stop an instance with a slow clock from repeating the job after the release.
  const earlier = await readFile(file, 'utf8').catch(() => undefined)
  if (earlier) return `stood aside: process ${JSON.parse(earlier).pid} made the report`

  const total = await addUp(signal)
  // 'wx': never overwrites a report.
  const report = { day, total, pid: process.pid, fencingToken: String(fencingToken) }
  await writeFile(file, JSON.stringify(report), { flag: 'wx' })
  return `made the report: ${total}`
})
console.log(`${process.pid} ${outcome}`)
await locks.close()

/**
 * The job. Throws when the lease is lost: another instance may do the job then.
 *
 * @param {AbortSignal} signal
 */
async function addUp(signal) {
  let total = 0
  for (let hour = 0; hour < 24; hour++) {
    signal.throwIfAborted()
    total += await new Promise((resolve) => setTimeout(resolve, 20, hour))
  }
  return total
}
