// Starts, kills and replaces the demo's four processes, and runs the rounds.
import { fork } from 'node:child_process'
import { fileURLToPath } from 'node:url'

const WORKER = fileURLToPath(new URL('worker.mjs', import.meta.url))
const START_LIMIT_MS = 30_000
const ROUND_LIMIT_MS = 120_000
/** The step of the job at which the holder is killed. */
const FATAL_STEP = 2

/**
 * @typedef {import('./database.mjs').Details & { outcome: string }} Outcome
 * @typedef {{ name: string, done: (value?: unknown) => void }} Round
 * @typedef {{ child: import('node:child_process').ChildProcess, exited: Promise<unknown>, round?: Round }} Member
 */
export class DemoProcesses {
  #url
  #database
  #screen
  /** @type {Map<string, Member>} */
  #members = new Map()
  /** @type {string | undefined} The name of the round whose holder is to be killed. */
  #roundToKill

  /** @param {{ url: string, database: import('./database.mjs').Database, screen: import('./screen.mjs').Screen }} parts */
  constructor({ url, database, screen }) {
    this.#url = url
    this.#database = database
    this.#screen = screen
  }

  /**
   * Starts a process, and waits until it is connected to the store.
   *
   * @param {string} worker
   */
  async start(worker) {
    const env = { ...process.env, HOLDFAST_URL: this.#url }
    // Structured clones instead of JSON, which has no bigint.
    const child = fork(WORKER, { env, serialization: 'advanced' })
    /** @type {Member} */
    const member = { child, exited: new Promise((resolve) => child.once('exit', resolve)) }
    this.#members.set(worker, member)
    const ready = /** @type {Promise<void>} */ (
      new Promise((resolve, reject) => {
        child.once('message', (/** @type {any} */ { type, message }) =>
          type === 'ready' ? resolve() : reject(new Error(message)),
        )
        child.once('exit', (code, signal) => reject(new Error(`process ${worker} ended at once (${signal ?? code})`)))
      })
    )
    await within(START_LIMIT_MS, `process ${worker} did not start`, ready)
    child.on('message', (message) => this.#receive(worker, member, message))
    child.once('exit', () => {
      // The process ended by itself: its round has failed.
      if (member.round) this.#settle(worker, member, { outcome: 'failed', message: 'the process ended' })
    })
  }

  /**
   * Runs one round in all processes, and waits until each has finished.
   *
   * @param {string} name
   * @param {{ killing: boolean }} options
   */
  async runRound(name, { killing }) {
    if (killing) this.#roundToKill = name
    for (const worker of this.#members.keys()) this.#screen.show(worker, 'waits', { pid: this.#pid(worker) })
    // In random order: otherwise the first process always has an advantage.
    const order = [...this.#members.keys()].sort(() => Math.random() - 0.5)
    await within(ROUND_LIMIT_MS, 'a round did not end', Promise.all(order.map((worker) => this.#send(worker, name))))
    for (const [worker, { child }] of this.#members) {
      // A killed process is replaced, as an orchestrator does.
      if (child.signalCode) await this.start(worker)
    }
  }

  /**
   * Runs the round once more in one process, after all have finished.
   *
   * @param {string} name
   */
  async runLate(name) {
    const [worker] = this.#members.keys()
    this.#screen.show(worker, 'waits', { pid: this.#pid(worker) })
    await within(ROUND_LIMIT_MS, 'the late process did not finish', this.#send(worker, name))
  }

  /**
   * Ends the running processes, by closing their channels or by a signal.
   *
   * @param {NodeJS.Signals} [signal]
   */
  async end(signal) {
    /** @param {Member} member */
    const runs = ({ child }) => child.exitCode === null && child.signalCode === null
    const members = [...this.#members.values()].filter(runs)
    for (const { child } of members) {
      if (signal) child.kill(signal)
      else child.disconnect()
    }
    await within(START_LIMIT_MS, 'a process did not end', Promise.all(members.map(({ exited }) => exited)))
  }

  /** @param {string} worker */
  #member(worker) {
    const member = this.#members.get(worker)
    if (!member) throw new Error(`there is no process ${worker}`)
    return member
  }

  /** @param {string} worker */
  #pid(worker) {
    return this.#member(worker).child.pid
  }

  /** @param {string} worker @param {string} name */
  #send(worker, name) {
    const member = this.#member(worker)
    return new Promise((resolve) => {
      member.round = { name, done: resolve }
      member.child.send({ type: 'go', name })
    })
  }

  /** @param {string} worker @param {Member} member @param {any} message */
  #receive(worker, member, message) {
    if (message.type === 'outcome') return this.#settle(worker, member, message)
    const answer = this.#answer(worker, message.verb, message.args)
    if (answer !== NEVER) member.child.send({ type: 'answer', id: message.id, value: answer })
  }

  /** @param {string} worker @param {string} verb @param {[string, any]} args */
  #answer(worker, verb, [name, argument]) {
    const database = this.#database
    switch (verb) {
      case 'enter':
        this.#screen.setDetails(worker, { token: argument })
        return database.enter(name, worker, argument)
      case 'find':
        return database.find(name)
      case 'start':
        this.#screen.show(worker, 'works', { step: 0 })
        return database.note('start', name, worker)
      case 'progress':
        this.#screen.show(worker, 'works', { step: argument })
        // The process waits for this answer, and so is killed during its job on a machine of any speed.
        if (argument === FATAL_STEP && this.#roundToKill === name) return this.#kill(worker)
        return
      case 'store':
        return database.store(name, worker, argument)
      case 'leave':
        return database.note('leave', name, worker)
    }
  }

  /** @param {string} worker */
  #kill(worker) {
    const member = this.#member(worker)
    this.#roundToKill = undefined
    member.child.kill('SIGKILL')
    this.#settle(worker, member, { outcome: 'killed' })
    return NEVER
  }

  /** @param {string} worker @param {Member} member @param {Outcome} outcome */
  #settle(worker, member, { outcome, ...more }) {
    if (!member.round) throw new Error(`the process ${worker} is in no round`)
    const { name, done } = member.round
    member.round = undefined
    if (outcome === 'killed' || outcome === 'failed') this.#database.note(outcome, name, worker, more)
    this.#screen.show(worker, outcome, more)
    // After a kill, wait until the process has ended.
    if (outcome === 'killed') member.exited.then(done)
    else done()
  }
}

const NEVER = Symbol('never')

/**
 * @template T
 * @param {number} limitMs
 * @param {string} complaint
 * @param {Promise<T>} promise
 */
function within(limitMs, complaint, promise) {
  /** @type {NodeJS.Timeout} */
  let timer
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(complaint)), limitMs)
  })
  return Promise.race([promise, late]).finally(() => clearTimeout(timer))
}
