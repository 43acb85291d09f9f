// `npm run demo`: four processes compete for the 18:00 report, in three rounds. The holder of the second round is killed during
// its job. The verdict at the end is computed from a record of all events.
//
//   HOLDFAST_URL=redis://…     uses this store (or mongodb://…, postgres://…, mysql://…, etcd://…, zookeeper://…); without it, the embedded store in a temporary folder
//   HOLDFAST_DEMO_SABOTAGE=1   the processes ignore the lock, and the verdict must fail
//   --no-build                 uses the existing addon
import { randomBytes } from 'node:crypto'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { ensureBuilt } from './demo/build.mjs'
import { DemoProcesses } from './demo/processes.mjs'
import { TTL_MS } from './demo/job.mjs'
import { Database, judge } from './demo/database.mjs'
import { Screen } from './demo/screen.mjs'

const KILL_ROUND = 1

/** @param {number} status @param {unknown} reason An error, or a message. */
const exit = (status, reason) => {
  console.error(`demo: ${reason instanceof Error ? reason.message : reason}`)
  process.exit(status)
}
const [major] = process.versions.node.split('.')
if (Number(major) < 20) exit(1, `holdfast needs Node 20 or newer, this is ${process.version}`)

try {
  if (!process.argv.includes('--no-build')) ensureBuilt((text) => console.error(`demo: ${text}`))
} catch (error) {
  exit(1, error)
}

// After the build: the screen shows the time since it was created.
const screen = new Screen(process.stdout)
const folder = mkdtempSync(join(tmpdir(), 'holdfast-demo-'))
process.on('exit', () => rmSync(folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 }))

const given = process.env.HOLDFAST_URL
if (given?.startsWith('memory:'))
  exit(1, 'memory: is a store of one process, and this needs one that four processes share')
// Characters with a meaning in a URL are escaped.
const embedded = `sqlite:${join(folder, 'locks.sqlite').replace(/[%?]/g, encodeURIComponent)}`
const url = given || embedded
// Without passwords.
const shown = given ? given.replace(/\/\/.*@/, '//').replace(/\?.*/, '') : `the embedded store, ${embedded}`

// Unique names: a run never meets the leftovers of another run (which may stay for a day) or a real lock.
const run = randomBytes(4).toString('hex')
const names = ['mon', 'tue', 'wed'].map((day) => `demo-${run}:report:${day}:18:00`)

const database = new Database()
const processes = new DemoProcesses({ url, database, screen })
for (const signal of ['SIGINT', 'SIGTERM']) {
  process.once(signal, () => {
    processes.end('SIGKILL')
    process.exit(1)
  })
}

screen.print(`Four processes, three days, one report a day, at 18:00. Store: ${shown}`)
screen.print(
  `Each acquires the lock (${TTL_MS / 1000} s, renewed), checks for the report, and makes it if it is missing.`,
)
screen.print('A late process finds the report, and does not make it again: after the first release the lock is free.')
if (url.startsWith('zookeeper'))
  screen.print('ZooKeeper ends the lock of a killed process with its session: after 10 to 12 s.')
if (process.env.HOLDFAST_DEMO_SABOTAGE === '1') screen.print('SABOTAGE: they ignore the lock.')

try {
  await Promise.all(['A', 'B', 'C', 'D'].map((worker) => processes.start(worker)))
  for (const [index, name] of names.entries()) {
    const killing = index === KILL_ROUND
    screen.round(`Round ${index + 1}: ${name}${killing ? '. The holder is killed during its job' : ''}`)
    await processes.runRound(name, { killing })
  }
  screen.round('Late: a process with a slow clock starts after all others have finished')
  await processes.runLate(names[names.length - 1])
} catch (error) {
  processes.end('SIGKILL')
  exit(1, error)
}
await processes.end()

const verdict = judge(database.entries, names, KILL_ROUND)
screen.verdict(verdict)
process.exitCode = verdict.every(({ ok }) => ok) ? 0 : 1
