// `npm run demo`: four real processes race for the 18:00 report, three times over. The holder of the second round is
// killed in the middle of its job. What comes out at the end is computed from a record of what happened.
//
//   HOLDFAST_URL=redis://…  or  mongodb://…   the same there; without it, on the embedded store in a temp folder
//   HOLDFAST_DEMO_SABOTAGE=1                  the processes ignore the lock, and the verdict must say so
//   --no-build                                take the addon as it is
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

const give = (status, message) => {
  console.error(`demo: ${message}`)
  process.exit(status)
}
const [major] = process.versions.node.split('.')
if (Number(major) < 20) give(1, `holdfast needs Node 20 or newer, this is ${process.version}`)

try {
  if (!process.argv.includes('--no-build')) ensureBuilt((text) => console.error(`demo: ${text}`))
} catch (error) {
  give(1, error.message)
}

// After the build: its clock counts from the first line.
const screen = new Screen(process.stdout)
const folder = mkdtempSync(join(tmpdir(), 'holdfast-demo-'))
process.on('exit', () => rmSync(folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 }))

const given = process.env.HOLDFAST_URL
if (given?.startsWith('memory:')) give(1, 'memory: is a store of one process, and this needs one that four can share')
// As in any URL, what would mean something else is escaped.
const embedded = `sqlite:${join(folder, 'locks.sqlite').replace(/[%?]/g, encodeURIComponent)}`
const url = given || embedded
// Passwords are nobody's business.
const shown = given ? given.replace(/\/\/.*@/, '//').replace(/\?.*/, '') : `the embedded store, ${embedded}`

// Unique, so that no run meets what another one left (what is left of a name may live on for a day), nor anybody's real lock.
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
screen.print(`Each takes the lock (${TTL_MS / 1000} s, renewed), looks for the report, and makes it if it is missing.`)
screen.print('The look keeps a late one from making it again: once the first has released, the lock is free.')
if (process.env.HOLDFAST_DEMO_SABOTAGE === '1') screen.print('SABOTAGE: they ignore the lock.')

try {
  await Promise.all(['A', 'B', 'C', 'D'].map((worker) => processes.start(worker)))
  for (const [index, name] of names.entries()) {
    const killing = index === KILL_ROUND
    screen.round(`Round ${index + 1}: ${name}${killing ? '. Who wins is killed in the middle of the job' : ''}`)
    await processes.runRound(name, { killing })
  }
  screen.round('Late: one comes when all is over, its clock is slow')
  await processes.runLate(names.at(-1))
} catch (error) {
  processes.end('SIGKILL')
  give(1, error.message)
}
await processes.end()

const verdict = judge(database.entries, names, KILL_ROUND)
screen.verdict(verdict)
process.exitCode = verdict.every(({ ok }) => ok) ? 0 : 1
