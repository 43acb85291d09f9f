// The command of `run`, and its process group.
import { spawn } from 'node:child_process'
import { readdirSync, readFileSync } from 'node:fs'
import { constants } from 'node:os'
import { setTimeout } from 'node:timers/promises'
import { NOT_EXECUTABLE, NOT_FOUND } from './common.mjs'
import { complain } from './text.mjs'

/** The time between two looks at a process group, in milliseconds. */
const PROBE_MS = 50

/** A command in its own process group; in the foreground, in that of the terminal. */
export class Child {
  /** Resolves to the exit code. @type {Promise<number>} */
  ended
  /** @type {number | undefined} */
  #pid
  #isForeground
  #hasEnded = false

  /**
   * Starts a command.
   *
   * @param {string} file
   * @param {string[]} args
   * @param {NodeJS.ProcessEnv} env
   * @param {boolean} isForeground
   */
  constructor(file, args, env, isForeground) {
    this.#isForeground = isForeground
    this.ended = new Promise((resolve) => {
      const fail = (/** @type {NodeJS.ErrnoException} */ error) => {
        const isMissing = error.code === 'ENOENT' || error.code === 'ENOTDIR'
        complain(`${file}: ${isMissing ? 'there is no such command' : error.message}`)
        resolve(isMissing ? NOT_FOUND : NOT_EXECUTABLE)
      }
      try {
        const started = spawn(file, args, { stdio: 'inherit', env, detached: !isForeground })
        this.#pid = started.pid
        started.on('error', fail)
        started.on('exit', (status, signal) => {
          this.#hasEnded = true
          resolve(signal ? 128 + constants.signals[signal] : (status ?? 0))
        })
      } catch (error) {
        // Some errors of `spawn`, such as ENOEXEC, are thrown.
        fail(/** @type {NodeJS.ErrnoException} */ (error))
      }
    })
  }

  /**
   * Sends a signal to the process group; in the foreground, to the command alone.
   *
   * @param {NodeJS.Signals | 0} signal
   * @returns {boolean} whether there is a process that has received it
   */
  send(signal) {
    if (this.#pid === undefined || (this.#isForeground && this.#hasEnded)) return false
    try {
      return process.kill(this.#isForeground ? this.#pid : -this.#pid, signal)
    } catch {
      // It has ended, or is a process of another user.
      return false
    }
  }

  /**
   * Waits until the process group is empty, after the command has ended. Kills what is left after `graceMs`, or when `signal` aborts.
   *
   * @param {number} graceMs
   * @param {{ readonly aborted: boolean }} signal
   */
  async endGroup(graceMs, signal) {
    const killAt = performance.now() + graceMs
    while (!this.#isForeground && this.#isGroupAlive()) {
      if (signal.aborted || performance.now() >= killAt) this.send('SIGKILL')
      await setTimeout(PROBE_MS)
    }
  }

  #isGroupAlive() {
    if (!this.send(0)) return false
    // A process that has ended stays in its group until its parent reads its exit code. A container may have no process that does.
    const processes = readProcesses()
    return !processes || processes.some(({ group, state }) => group === this.#pid && state !== 'Z' && state !== 'X')
  }
}

/** Returns the processes of this machine; `undefined` on a system without `/proc`. */
function readProcesses() {
  try {
    return readdirSync('/proc')
      .filter((name) => /^\d+$/.test(name))
      .flatMap((pid) => {
        try {
          const text = readFileSync(`/proc/${pid}/stat`, 'latin1')
          // See proc_pid_stat(5). The name of the program, in parentheses, may have any character.
          const [state, , group] = text.slice(text.lastIndexOf(')') + 2).split(' ')
          return [{ state, group: Number(group) }]
        } catch {
          // It has ended.
          return []
        }
      })
  } catch {
    return undefined
  }
}
