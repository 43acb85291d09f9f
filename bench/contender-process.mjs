// The processes of the benchmark, as their parent sees them: contenders, and the load generator.
import { fork } from 'node:child_process'
import { fileURLToPath } from 'node:url'

/** The number of processes that start at the same time. */
const AT_A_TIME = 3

/** A process that answers one request at a time. */
export class Process {
  name = ''
  #child
  #failure

  /** Starts a script of this folder, with options of `fork`. Resolves when it is ready. */
  static async start(name, script, args, options = {}) {
    const started = new Process()
    started.name = name
    const child = (started.#child = fork(fileURLToPath(new URL(script, import.meta.url)), args, {
      execArgv: [],
      ...options,
    }))
    started.#failure = new Promise((_, reject) => {
      child.once('exit', (code, signal) => reject(new Error(`${name} ended with ${code ?? signal}`)))
    })
    started.#failure.catch(() => {})
    await started.#answer()
    return started
  }

  #answer() {
    return Promise.race([new Promise((resolve) => this.#child.once('message', resolve)), this.#failure])
  }

  /** Rejects when the process ends. */
  get failure() {
    return this.#failure
  }

  ask(message) {
    const answered = this.#answer()
    this.#child.send(message)
    return answered
  }

  /** Sends a message whose answers go to `receive`. */
  send(message) {
    this.#child.send(message)
  }

  receive(listener) {
    this.#child.on('message', listener)
  }

  async close() {
    const ended = new Promise((resolve) => this.#child.once('exit', resolve))
    this.#child.send({ what: 'close' })
    const code = await ended
    if (code !== 0) throw new Error(`${this.name} did not close: its process ended with ${code}`)
  }

  /** Kills the process, whose names expire. */
  kill() {
    const ended = new Promise((resolve) => this.#child.once('exit', resolve))
    this.#child.kill('SIGKILL')
    return ended
  }
}

/** Starts a process of a contender, with options of `fork`. `target`: the URLs of its servers, and the authority of their certificates. */
export const startContender = (name, target, options = {}) =>
  Process.start(name, 'contender.mjs', [name, JSON.stringify(target)], options)

/** Starts a process of each contender, a few at a time, so that each has enough of the CPU while it connects. */
export async function startContenders(names, target) {
  const running = []
  for (let from = 0; from < names.length; from += AT_A_TIME) {
    const some = names.slice(from, from + AT_A_TIME)
    running.push(...(await Promise.all(some.map((name) => startContender(name, target)))))
  }
  return running
}
