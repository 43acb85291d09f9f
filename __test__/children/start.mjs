// Starts a process under test, exchanges messages with it, and reports how it ended.
import { spawn } from 'node:child_process'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'

const folder = new URL('.', import.meta.url)

/**
 * Starts `children/<script>.mjs` with a task, and kills it when the test `t` has ended.
 *
 * With `requests: false` the process has no input: only its own work keeps it alive. The other options are those of `spawn`.
 *
 * @param {import('node:test').TestContext} t
 * @param {string} script
 * @param {unknown} task
 * @param {import('node:child_process').SpawnOptions & { requests?: boolean }} [options]
 */
export function start(t, script, task, { requests = true, ...options } = {}) {
  const child = new Child(script, task, requests, options)
  t.after(() => child.kill('SIGKILL'))
  return child
}

class Child {
  #process
  #script
  #inbox = []
  #notify = () => {}
  messages = []
  stderr = ''

  constructor(script, task, requests, options) {
    this.#script = script
    const args = [
      '--expose-gc',
      '--no-warnings=ExperimentalWarning',
      fileURLToPath(new URL(`${script}.mjs`, folder)),
      JSON.stringify(task),
    ]
    this.#process = spawn(process.execPath, args, {
      stdio: [requests ? 'pipe' : 'ignore', 'pipe', 'pipe'],
      ...options,
    })
    // Writing to a killed process is no failure of the test.
    this.#process.stdin?.on('error', () => {})
    this.#process.stderr.setEncoding('utf8').on('data', (text) => (this.stderr += text))
    createInterface({ input: this.#process.stdout }).on('line', (line) => {
      const message = JSON.parse(line)
      this.messages.push(message)
      this.#inbox.push(message)
      this.#notify()
    })
    /** Resolves to `{ code, signal }` once the process has ended and all its messages have been read. */
    this.ended = new Promise((resolve) => this.#process.once('close', (code, signal) => resolve({ code, signal })))
    this.ended.then((end) => {
      this.end = end
      this.#notify()
    })
  }

  get pid() {
    return this.#process.pid
  }

  kill(signal) {
    return this.#process.kill(signal)
  }

  send(line) {
    this.#process.stdin.write(`${line}\n`)
  }

  /** Ends its input: a script that waits for requests then ends. */
  endInput() {
    this.#process.stdin.end()
    return this.ended
  }

  /** Waits for the next message with the property `key`, and returns that property. Drops the messages before it. */
  async next(key, limitMs = 60_000) {
    const deadline = Date.now() + limitMs
    for (;;) {
      while (this.#inbox.length > 0) {
        const message = this.#inbox.shift()
        if (message.error !== undefined) throw new Error(`${this.#script} failed: ${message.error}`)
        if (Object.hasOwn(message, key)) return message[key]
      }
      if (this.end)
        throw new Error(`${this.#script} ended (${JSON.stringify(this.end)}) before it sent ${key}. ${this.stderr}`)
      if (Date.now() > deadline)
        throw new Error(`${this.#script} did not send ${key} within ${limitMs} ms. ${this.stderr}`)
      await /** @type {Promise<void>} */ (
        new Promise((resolve) => {
          const timer = setTimeout(resolve, 1000)
          this.#notify = () => (clearTimeout(timer), resolve())
        })
      )
    }
  }
}
