// `holdfast run`.
import { constants } from 'node:os'
import { setTimeout } from 'node:timers/promises'
import { isLockError } from '../../index.js'
import { Child } from './child.mjs'
import { BUSY, LOST, millisecondsOf, oneOf, quoted, timeOf, UsageError, withLocks } from './common.mjs'
import { complain } from './text.mjs'

/** The signals that are forwarded to the command, and those of them that end it. */
const FORWARDED = /** @type {const} */ (['SIGTERM', 'SIGINT', 'SIGHUP', 'SIGQUIT', 'SIGUSR1', 'SIGUSR2'])
const ENDING = ['SIGTERM', 'SIGINT', 'SIGHUP', 'SIGQUIT']
/** The signals of a terminal that stop the process. */
const STOPPING = /** @type {const} */ (['SIGTSTP', 'SIGTTIN'])
/** The time in which the command may stop itself, for example after it has restored the terminal. In milliseconds. */
const STOP_GRACE_MS = 100

/** The options that acquire something else than a lock, and what messages call that. */
const SHARED = { limit: 'permit of', read: 'read lock', write: 'write lock' }

/** The command of `run` failed. */
class CommandFailed extends Error {}

/** @type {import('./common.mjs').Run} */
export async function run(names, values, [file, ...args]) {
  if (names.length === 0) throw new UsageError('a name is missing')
  if (!file) throw new UsageError('a command is missing: write it after --')
  const ttlMs = timeOf(values, 'ttl', '30s')
  const waitMs = values.wait === 'forever' ? Infinity : timeOf(values, 'wait')
  const minHoldMs = timeOf(values, 'min-hold')
  const periodMs = timeOf(values, 'once-per')
  const leaseMs = millisecondsOf(ttlMs ?? 0)
  const killAfterMs = Math.min(millisecondsOf(timeOf(values, 'kill-after', '5s') ?? 0), leaseMs / 3)
  const busyCode = busyCodeOf(values)
  if (periodMs !== undefined) {
    oneOf(names)
    if (minHoldMs !== undefined) throw new UsageError('--min-hold and --once-per exclude each other')
  }
  const shared = sharedOf(names, values)

  const wait = new AbortController()
  /** @type {Execution | undefined} */
  let execution
  /** @param {NodeJS.Signals} signal */
  const forward = (signal) => {
    if (!execution) wait.abort(signal)
    // In the foreground, the terminal sends its signals to the command as well.
    else if (!(values.foreground && signal === 'SIGINT' && process.stdin.isTTY)) execution.forward(signal)
  }
  const stop = () => (execution ? execution.stop() : stopSelf())
  const resume = () => execution?.resume()
  for (const signal of FORWARDED) process.on(signal, forward)
  for (const signal of STOPPING) process.on(signal, stop)
  process.on('SIGCONT', resume)

  let code = 0
  try {
    const options = { ttlMs, waitMs, signal: wait.signal }
    const attempt = await withLocks(values, (locks) => {
      /** @param {import('../../index.js').Lock} lock */
      const job = async (lock) => {
        // The first lease after a wait can be short. With less than `killAfterMs` left, the command would be stopped at its start.
        if (lock.remainingMs < leaseMs * 0.9) await lock.extend(leaseMs)
        // The signal came after the grant.
        if (wait.signal.aborted) throw new CommandFailed()
        const env = {
          ...process.env,
          HOLDFAST_NAME: names.join(','),
          HOLDFAST_FENCING_TOKEN: String(lock.fencingToken),
          // Not that of an outer `run`.
          HOLDFAST_PERMITS: shared === 'limit' ? String(lock.permits) : undefined,
        }
        const child = new Child(file, args, env, values.foreground === true)
        // On ZooKeeper a lease may be shorter than its ttl.
        const what = `the ${shared ? SHARED[shared] : 'lock'} ${quoted(lock.names)}`
        execution = new Execution(child, lock, what, locks, Math.min(killAfterMs, lock.remainingMs / 3))
        code = await execution.ended
        // With --once-per the name is free after a failure.
        if (code !== 0 && periodMs !== undefined) throw new CommandFailed()
      }
      if (periodMs !== undefined) return locks.oncePer(names[0], { ...options, periodMs }, job)
      const held = { ...options, minHoldMs }
      if (shared === undefined) return locks.tryUsing(names, held, job)
      if (shared !== 'limit') return locks.readWriteLock(names[0])[shared].tryUsing(held, job)
      const [limit, permits] = [values.limit, values.permits ?? 1].map(Number)
      return locks.semaphore(names[0], limit).tryUsing({ ...held, permits }, job)
    })
    if (!attempt.ran) {
      const holder = attempt.holder ? `, held by process ${attempt.holder.pid} on ${attempt.holder.host}` : ''
      complain(`${names.join(', ')}: busy${holder}`)
      return busyCode
    }
    return code
  } catch (error) {
    if (wait.signal.aborted) return 128 + constants.signals[/** @type {NodeJS.Signals} */ (wait.signal.reason)]
    if (error instanceof CommandFailed) return code
    if (isLockError(error, 'LOCK_LOST')) {
      if (!execution?.isKilled) complain(error.message)
      return LOST
    }
    throw error
  } finally {
    for (const signal of FORWARDED) process.off(signal, forward)
    for (const signal of STOPPING) process.off(signal, stop)
    process.off('SIGCONT', resume)
  }
}

/**
 * Returns the option that acquires something else than a lock.
 *
 * @param {string[]} names
 * @param {import('./common.mjs').Values} values
 */
function sharedOf(names, values) {
  const given = /** @type {(keyof typeof SHARED)[]} */ (Object.keys(SHARED)).filter((option) => option in values)
  if (values.permits !== undefined && !given.includes('limit')) throw new UsageError('--permits needs --limit')
  if (given.length === 0) return undefined
  const excluding = [...given, ...('once-per' in values ? ['once-per'] : [])].map((option) => `--${option}`)
  if (excluding.length > 1) throw new UsageError(`${excluding.join(' and ')} exclude each other`)
  oneOf(names)
  for (const option of ['limit', 'permits']) {
    // The service checks the range.
    if (!/^\d{1,15}$/.test(String(values[option] ?? 1)))
      throw new UsageError(`--${option} must be a whole number, got ${JSON.stringify(values[option])}`)
  }
  return given[0]
}

/** @param {import('./common.mjs').Values} values */
function busyCodeOf({ 'busy-code': text = String(BUSY) }) {
  const code = /^\d{1,3}$/.test(String(text)) ? Number(text) : NaN
  if (code <= 255) return code
  throw new UsageError(`--busy-code must be a number from 0 to 255, got ${JSON.stringify(text)}`)
}

/** Stops this process, until it receives SIGCONT. */
function stopSelf() {
  process.kill(process.pid, 'SIGSTOP')
}

/**
 * A command under a lock. Stops it before another process can hold the lock: SIGTERM when the lease ends within `killAfterMs`, SIGKILL
 * when the lock is lost.
 */
class Execution {
  /** Resolves to the exit code, when the lock may be released. @type {Promise<number>} */
  ended
  /** Whether the command was killed, because the lock was lost. */
  isKilled = false
  #child
  #lock
  #what
  #locks
  #killAfterMs
  #storeErrors
  /** Whether the lock was lost, or about to be. */
  #isLost = false
  /** Whether the command has received a signal that ends it. */
  #isEnding = false
  /** Whether this process is about to stop. */
  #isStopping = false
  #end = new AbortController()

  /**
   * @param {Child} child
   * @param {import('../../index.js').Lock} lock
   * @param {string} what the lock in messages
   * @param {import('../../index.js').LockService} locks
   * @param {number} killAfterMs
   */
  constructor(child, lock, what, locks, killAfterMs) {
    this.#child = child
    this.#lock = lock
    this.#what = what
    this.#locks = locks
    this.#killAfterMs = killAfterMs
    this.#storeErrors = locks.stats().storeErrors
    lock.signal.addEventListener('abort', () => this.#kill(), { signal: this.#end.signal })
    if (lock.signal.aborted) this.#kill()
    // Rejects at the end.
    else this.#terminate().catch(() => {})
    this.ended = this.#run()
  }

  async #run() {
    const code = await this.#child.ended
    // Processes that the command started may still do what needs the lock.
    if (this.#isEnding) await this.#child.endGroup(this.#killAfterMs, this.#lock.signal)
    this.#end.abort()
    return this.#isLost ? LOST : code
  }

  /** @param {NodeJS.Signals} signal */
  forward(signal) {
    if (this.#end.signal.aborted) return
    this.#isEnding ||= ENDING.includes(signal)
    this.#child.send(signal)
  }

  /**
   * Stops the command, and then this process: without it, the lease is not renewed. A process group without a terminal ignores SIGTSTP,
   * so SIGSTOP follows.
   */
  async stop() {
    if (this.#isStopping) return
    this.#isStopping = true
    if (!this.#end.signal.aborted) {
      this.#child.send('SIGTSTP')
      await setTimeout(STOP_GRACE_MS)
      // SIGCONT came meanwhile.
      if (!this.#isStopping) return
      if (!this.#end.signal.aborted) this.#child.send('SIGSTOP')
    }
    stopSelf()
  }

  /** Continues the command if the lock is still held; otherwise another process may hold it, and the command is killed. */
  resume() {
    this.#isStopping = false
    if (this.#end.signal.aborted) return
    if (this.#lock.signal.aborted || this.#lock.remainingMs <= 0) this.#kill()
    else this.#child.send('SIGCONT')
  }

  async #terminate() {
    for (let left; (left = this.#lock.remainingMs - this.#killAfterMs) > 0;)
      await setTimeout(left, undefined, { signal: this.#end.signal })
    if (this.#isLost) return
    this.#isLost = this.#isEnding = true
    this.#child.send('SIGTERM')
    const failed = this.#locks.stats().storeErrors - this.#storeErrors
    const cause =
      failed > 0 ? `calls to the store failed (${failed})` : 'the store did not answer, or this process stood still'
    const leftMs = Math.max(0, this.#lock.remainingMs)
    complain(
      `${this.#what} was not renewed: ${cause}. Its lease ends in ${Math.round(leftMs)} ms: SIGTERM to the command`,
    )
  }

  #kill() {
    if (this.isKilled) return
    this.isKilled = this.#isLost = this.#isEnding = true
    // First of all: another process may hold the lock.
    this.#child.send('SIGKILL')
    const { aborted, reason } = this.#lock.signal
    const cause = aborted
      ? /** @type {Error} */ (reason).message
      : `${this.#what} is lost: its lease ended while this process stood still`
    complain(`${cause}: SIGKILL to the command`)
  }
}
