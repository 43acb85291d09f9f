// What the jobs of one trial did, and when, by the monotonic clock that all processes of a machine share.
import { openSync, readFileSync, writeSync } from 'node:fs'
import { setTimeout as sleep } from 'node:timers/promises'

/** The time between two steps of a job, in milliseconds. */
export const STEP_MS = 10
/** The duration of the job of a tick, in milliseconds. */
export const JOB_MS = 50

/** Returns the time in milliseconds. */
export const now = () => Number(process.hrtime.bigint() / 1000n) / 1000

/** Returns a function that appends an event of the job `id`. Each event is one small write, so that a killed process leaves whole lines. */
export function stepLog(file, id) {
  const descriptor = openSync(file, 'a')
  return (what) => void writeSync(descriptor, `${id} ${what} ${now()} ${process.pid}\n`)
}

/** Works in steps until `isEnded()`. */
export async function work(log, isEnded) {
  log('begin')
  while (!isEnded()) {
    log('step')
    await sleep(STEP_MS)
  }
  log('end')
}

/** Does the job of a tick. */
export async function jobOf(log, tick) {
  log(`run-${tick}`)
  await sleep(JOB_MS)
}

/** Reads the events of a file, in order of time. The last line may be incomplete. */
export function readEvents(file) {
  const lines = readFileSync(file, 'utf8').split('\n').slice(0, -1)
  return lines
    .map((line) => {
      const [id, what, at, pid] = line.split(' ')
      return { id, what, at: Number(at), pid: Number(pid) }
    })
    .sort((one, other) => one.at - other.at)
}

/** Returns the runs of the jobs, in order of their begin: from a `begin` to the last event of the same process before the next one. */
export function runsOf(events) {
  const runs = []
  for (const { id, what, at, pid } of events) {
    if (what === 'begin') runs.push({ id, pid, begin: at, last: at, steps: [], hasEnded: false })
    const run = runs.findLast((one) => one.pid === pid)
    if (!run) continue
    run.last = at
    if (what === 'step') run.steps.push(at)
    if (what === 'end') run.hasEnded = true
  }
  return runs
}

/** Returns how a trial ended. `leader` is the run of the leader, `from` the time of the fault, `to` that of the end of the trial. */
export function outcomeOf(events, { leader: { pid, begin }, from, to }) {
  const runs = runsOf(events.filter(({ at }) => at <= to))
  const leader = runs.find((run) => run.pid === pid && run.begin === begin)
  if (!leader) throw new Error('the log has no run of the leader')
  const next = runs.find((run) => run.begin > from)
  const steps = runs.flatMap((run) => run.steps).sort((one, other) => one - other)
  const around = [steps.findLast((at) => at <= from) ?? from, ...steps.filter((at) => at > from), to]
  const gaps = around.slice(1).map((at, i) => at - around[i])
  // The steps of a run after a later one began, and before that one ended.
  const late = runs
    .flatMap((run, i) =>
      runs.slice(i + 1).flatMap((later) => run.steps.filter((at) => at >= later.begin && at <= later.last)),
    )
    .sort((one, other) => one - other)
  const lastLate = late.at(-1)
  return {
    /** From the fault, or the end of a job that ended normally, to the begin of the next job. */
    nextMs: next && next.begin - (leader.hasEnded && leader.last < next.begin ? leader.last : from),
    isKept: !next && !leader.hasEnded && to - leader.last < 1000,
    idleMs: Math.max(...gaps),
    lateSteps: new Set(late).size,
    lateMs: lastLate === undefined ? 0 : lastLate - late[0] + STEP_MS,
    /** Whether two jobs still ran when the trial ended. */
    isLateAtEnd: lastLate !== undefined && to - lastLate < 500,
  }
}
