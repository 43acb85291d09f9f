// One trial: three candidates, a fault, and what followed.
import { spawn } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { existsSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { now, outcomeOf, readEvents, runsOf } from './step-log.mjs'

const CANDIDATES = 3
const START_TIMEOUT_MS = 60_000

/** The processes that this one has started and that have not ended. */
const processes = new Set()
process.on('exit', () => {
  for (const pid of processes) signal(pid, 'SIGKILL')
})

/** Sends a signal to a process, which may have ended. */
function signal(pid, name) {
  try {
    process.kill(pid, name)
  } catch (error) {
    if (error.code !== 'ESRCH') throw error
  }
}

/**
 * Starts a process, by default one that ends with this one. Returns it, with what it wrote to its standard error.
 *
 * @param {string[]} argv
 * @param {{ isCommand?: boolean }} [options]
 */
export function startProcess([file, ...args], { isCommand = false } = {}) {
  const child = spawn(file, args, { stdio: ['ignore', 'ignore', 'pipe', isCommand ? 'ignore' : 'ipc'] })
  const ended = new Promise((resolve) => child.once('close', resolve).once('error', resolve))
  const started = { child, pid: /** @type {number} */ (child.pid), errors: '', ended }
  child.stderr?.on('data', (data) => (started.errors = `${started.errors}${data}`.slice(-2000)))
  child.on('error', (error) => (started.errors += error.message))
  if (child.pid) processes.add(child.pid)
  child.on('exit', () => processes.delete(started.pid))
  return started
}

/** Kills a job that a candidate has started, if it still runs: another process may have its number. */
function killJob(pid, file) {
  try {
    if (process.platform === 'linux' && !readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes(file)) return
  } catch {
    // It has ended.
    return
  }
  signal(pid, 'SIGKILL')
}

/**
 * The faults. `holder` is the process that holds the lock, `job` the one that does the job: the same one, unless the contender is a
 * command. A fault `untilNext` ends its trial when the next leader has begun; every other one `lastsMs` after it.
 *
 * @typedef {{ holder: number, job: number, server: any, ttlMs: number }} Target
 * @typedef {{ title: string, text: string, trials: number, commandsOnly?: boolean, isEmpty?: boolean, untilNext?: boolean,
 *   lastsMs: (ttlMs: number) => number, apply: (target: Target) => Promise<void> | void }} Fault
 * @type {Record<string, Fault>}
 */
export const FAULTS = {
  resigns: {
    title: 'The leader resigns',
    text: 'Its job ends normally. The time is from the end of the job to the begin of the next one.',
    trials: 7,
    untilNext: true,
    lastsMs: (ttlMs) => ttlMs + 5000,
    apply: ({ job }) => signal(job, 'SIGUSR2'),
  },
  killed: {
    title: 'The leader is killed',
    text: 'SIGKILL to all of its processes.',
    trials: 7,
    untilNext: true,
    lastsMs: (ttlMs) => 2 * ttlMs + 5000,
    apply({ holder, job }) {
      signal(holder, 'SIGKILL')
      signal(job, 'SIGKILL')
    },
  },
  'command-killed': {
    title: 'Only the lock command is killed',
    text: 'SIGKILL to `holdfast run` or `etcdctl lock`, not to the command that it has started.',
    trials: 3,
    commandsOnly: true,
    lastsMs: (ttlMs) => 2 * ttlMs,
    apply: ({ holder }) => signal(holder, 'SIGKILL'),
  },
  suspended: {
    title: 'The leader is suspended',
    text: 'SIGSTOP to all of its processes for 3 s longer than the ttl, and then SIGCONT, as when a virtual machine stands still.',
    trials: 5,
    lastsMs: () => 6000,
    async apply({ holder, job, ttlMs }) {
      for (const pid of [job, holder]) signal(pid, 'SIGSTOP')
      await sleep(ttlMs + 3000)
      for (const pid of [job, holder]) signal(pid, 'SIGCONT')
    },
  },
  'command-suspended': {
    title: 'Only the lock command is suspended',
    text: 'SIGSTOP to `holdfast run` or `etcdctl lock` for 3 s longer than the ttl, and then SIGCONT. The command that it has started runs on.',
    trials: 3,
    commandsOnly: true,
    lastsMs: () => 6000,
    async apply({ holder, ttlMs }) {
      signal(holder, 'SIGSTOP')
      await sleep(ttlMs + 3000)
      signal(holder, 'SIGCONT')
    },
  },
  'store-pauses': {
    title: 'The store stands still for 3 s',
    text: 'SIGSTOP and SIGCONT to the server.',
    trials: 3,
    lastsMs: (ttlMs) => ttlMs + 3000,
    apply: pause(3000),
  },
  'store-pauses-longer': {
    title: 'The store stands still for longer than the ttl',
    text: 'SIGSTOP and SIGCONT to the server, 3 s longer than the ttl.',
    trials: 3,
    lastsMs: (ttlMs) => ttlMs + 5000,
    apply: (target) => pause(target.ttlMs + 3000)(target),
  },
  'store-restarts': {
    title: 'The store restarts with its data',
    text: 'SIGTERM, and a new server with the same data. Redis has `appendonly yes` and `appendfsync always`.',
    trials: 3,
    lastsMs: (ttlMs) => ttlMs + 5000,
    apply: ({ server }) => server.restart(),
  },
  'store-restarts-empty': {
    title: 'The store restarts without its data',
    text: 'A Redis without persistence.',
    trials: 3,
    isEmpty: true,
    lastsMs: (ttlMs) => ttlMs + 5000,
    apply: ({ server }) => server.restart(),
  },
}

/** Returns a fault that stops the server for some time. @param {number} ms @returns {(target: Target) => Promise<void>} */
function pause(ms) {
  return async ({ server }) => {
    await server.pause()
    await sleep(ms)
    server.resume()
  }
}

/**
 * Runs one trial. Resolves to the outcome.
 *
 * @param {import('./contenders.mjs').Contender} contender
 * @param {Fault} fault
 * @param {{ server: any, ttlMs: number, settleMs: number, folder: string }} options
 */
export async function trial(contender, fault, { server, ttlMs, settleMs, folder }) {
  const name = `election-${randomBytes(6).toString('hex')}`
  const file = join(folder, name)
  const events = () => (existsSync(file) ? readEvents(file) : [])
  const candidates = Array.from({ length: CANDIDATES }, (_, i) => {
    const task = { id: `candidate-${i}`, url: server.url, name, ttlMs, file }
    return Object.assign(startProcess(contender.argv(task), contender), { id: task.id })
  })
  const errors = () => candidates.map(({ errors }) => errors.trim()).join('\n')
  try {
    const deadline = now() + START_TIMEOUT_MS
    while (!events().some(({ what }) => what === 'step')) {
      if (now() > deadline) throw new Error(`no leader within ${START_TIMEOUT_MS} ms: ${errors()}`)
      await sleep(50)
    }
    // The others begin to wait. The random part is the time of the fault between two renewals.
    await sleep(settleMs + (Math.random() * ttlMs) / 3)
    const leader = /** @type {any} */ (runsOf(events()).at(-1))
    const holder = contender.isCommand ? candidates.find(({ id }) => id === leader.id)?.pid : leader.pid
    if (holder === undefined) throw new Error(`${leader.id} is not a candidate`)
    if (leader.hasEnded || now() - leader.last > ttlMs)
      throw new Error(`the leader has ended before the fault: ${errors()}`)
    const from = now()
    await fault.apply({ holder, job: leader.pid, server, ttlMs })
    const until = now() + fault.lastsMs(ttlMs)
    const isDone = () =>
      fault.untilNext && runsOf(events()).some(({ begin, steps }) => begin > from && steps.length > 20)
    while (now() < until && !isDone()) await sleep(50)
    return outcomeOf(events(), { leader, from, to: now() })
  } finally {
    for (const { pid } of candidates) if (processes.has(pid)) signal(pid, 'SIGKILL')
    // A job may begin while its candidate is killed.
    for (const ms of [0, 300]) {
      await sleep(ms)
      for (const pid of new Set(events().map(({ pid }) => pid))) killJob(pid, file)
    }
    await Promise.all(candidates.map(({ ended }) => ended))
  }
}
