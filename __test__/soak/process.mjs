// The runner's side of a process of the soak: starts it, sends it requests, stops or kills it.
import { fork } from 'node:child_process'
import { fileURLToPath } from 'node:url'

const SCRIPT = fileURLToPath(new URL('worker.mjs', import.meta.url))
/** Longer than any verb takes, even one that waits for late calls. */
const VERB_MS = 90_000
/** Probes to remember: those of the last minutes. */
const PROBES = 2000

export class Worker {
  #task
  #listener
  #process
  #requests = new Map()
  #serial = 0
  #generation = -1
  probes = []
  /** Whether it did not answer in time: it is replaced before the next round. */
  isUnresponsive = false

  /** `listener(worker, message)` gets its reports and requests. Its return value answers a request. */
  constructor(index, task, listener) {
    this.index = index
    this.#task = task
    this.#listener = listener
  }

  get tag() {
    return `w${this.index}.${this.#generation}`
  }

  /** When the last probe was granted (µs). */
  get lastProbe() {
    return this.probes.at(-1)
  }

  start() {
    this.#generation++
    this.isUnresponsive = false
    const tag = this.tag
    const child = fork(SCRIPT, [JSON.stringify({ ...this.#task, tag })], {
      execArgv: ['--expose-gc', '--no-warnings=ExperimentalWarning'],
      stdio: ['ignore', 'inherit', 'inherit', 'ipc'],
    })
    this.#process = child
    const ready = /** @type {Promise<void>} */ (
      new Promise((resolve, reject) => {
        child.once('exit', () => reject(new Error(`${tag} ended before it was ready`)))
        child.on('message', (/** @type {any} */ message) => {
          if (message.ready) resolve()
          else if (message.probe) this.probes = [...this.probes.slice(-PROBES), message.probe]
          else if (message.read)
            child.send({ id: message.id, reply: { value: this.#listener(this, message) } }, () => {})
          else if (message.id !== undefined) this.#answer(message)
          else this.#listener(this, message)
        })
      })
    )
    child.on('error', () => {})
    /** Resolves when it has ended and all its reports have been read. */
    this.ended = Promise.all(
      ['exit', 'disconnect'].map((event) => new Promise((resolve) => child.once(event, resolve))),
    )
    this.ended.then(([code]) => {
      this.#listener(this, { killed: tag })
      for (const [id, { reject }] of this.#requests) {
        this.#requests.delete(id)
        reject(new Error(`${tag} ended: ${child.signalCode ?? code}`))
      }
    })
    return ready
  }

  #answer({ id, result, error }) {
    const request = this.#requests.get(id)
    if (!request) return
    this.#requests.delete(id)
    if (error) request.reject(new Error(`${this.tag}: ${error}`))
    else request.resolve(result)
  }

  /** Runs `verb` of worker.mjs in the process. Resolves to its result. */
  async ask(verb, order = {}) {
    const id = ++this.#serial
    let timer
    const answer = new Promise((resolve, reject) => {
      this.#requests.set(id, { resolve, reject })
      timer = setTimeout(() => {
        this.isUnresponsive = true
        reject(new Error(`${this.tag} did not finish ${verb} within ${VERB_MS / 1000} s`))
      }, VERB_MS)
    })
    this.#process.send({ id, verb, ...order }, () => {})
    return answer.finally(() => clearTimeout(timer))
  }

  kill(signal) {
    this.#process.kill(signal)
  }

  /** Kills it with SIGKILL, and starts a replacement with the same work. */
  async replace() {
    this.kill('SIGKILL')
    await this.ended
    await this.start()
    await this.ask('open')
    await this.ask('work', { contenders: 3, rate: 0 })
  }

  /** Replaces a process that did not answer, before the next round. */
  async replaceIfUnresponsive() {
    if (!this.isUnresponsive) return
    this.kill('SIGKILL')
    await this.ended
    await this.start()
  }
}
