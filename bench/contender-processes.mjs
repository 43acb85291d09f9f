// Starts the contenders, each in a separate process, and measures them alternately.
import { fork } from 'node:child_process'
import { fileURLToPath } from 'node:url'

const PROCESS = fileURLToPath(new URL('contender.mjs', import.meta.url))

/** The process of one contender. */
export class Contender {
  /** @type {string} */
  module
  #child
  #failure

  static async start(module, urls) {
    const contender = new Contender()
    contender.module = module
    contender.#child = fork(PROCESS, [module, ...urls])
    contender.#failure = new Promise((_, reject) => {
      contender.#child.once('exit', (code, signal) => reject(new Error(`${module} ended with ${code ?? signal}`)))
    })
    contender.#failure.catch(() => {})
    await contender.#answer()
    return contender
  }

  #answer() {
    return Promise.race([new Promise((resolve) => this.#child.once('message', resolve)), this.#failure])
  }

  ask(message) {
    const answered = this.#answer()
    this.#child.send(message)
    return answered
  }

  async run(message) {
    const result = await this.ask(message)
    if (!(result.count > 0))
      throw new Error(`${this.module} completed no call in ${message.ms} ms, ${message.inFlight} in flight`)
    return result
  }

  async close() {
    const ended = new Promise((resolve) => this.#child.once('exit', resolve))
    this.#child.send({ what: 'close' })
    const code = await ended
    if (code !== 0) throw new Error(`${this.module} did not close: its process ended with ${code}`)
  }

  /** Kills the process, whose names expire. */
  kill() {
    const ended = new Promise((resolve) => this.#child.once('exit', resolve))
    this.#child.kill('SIGKILL')
    return ended
  }
}

/** Starts a process of each contender, one after the other, so that each has the CPU while it connects. */
export async function startContenders(modules, urls) {
  const running = []
  for (const module of modules) running.push(await Contender.start(module, urls))
  return running
}

let run = 0

/**
 * Measures `contenders` (modules) against the server or servers at `urls`, for each of `loads` (calls in flight) in
 * `rounds` rounds of `ms` milliseconds. `probe` measures the servers meanwhile; `what` is the call: `pair` or `tryHeld`.
 *
 * Resolves to the figures of all rounds, by load and by contender: `{ 64: { holdfast: [{ perSecond, … }, …] } }`.
 */
export async function measureAll({ contenders, urls, what, loads, probe, rounds, ms, warmUpMs }) {
  const running = await startContenders(contenders, urls)
  const prefixes = new Map(contenders.map((module) => [module, `bench-${process.pid}-${++run}-${module}-`]))
  if (what === 'tryHeld') await takeAll(contenders, urls, Math.max(...loads), prefixes)
  const results = {}
  for (const inFlight of loads) {
    const load = (contender, time) => ({ what, inFlight, ms: time, prefix: prefixes.get(contender.module) })
    const requests = {}
    const here = (results[inFlight] = Object.fromEntries(contenders.map((module) => [module, []])))
    for (const contender of running) {
      await contender.run(load(contender, warmUpMs))
      // Separate from the timed runs: MONITOR makes a server slower.
      requests[contender.module] = await probe.requests?.(
        async () => (await contender.run(load(contender, warmUpMs / 10))).count,
      )
    }
    for (let round = 0; round < rounds; round++) {
      // The order alternates from round to round: a drift of the machine affects all contenders equally.
      for (const contender of round % 2 === 0 ? running : [...running].reverse()) {
        const spent = await probe.start()
        const result = await contender.run(load(contender, ms))
        const { cpuUs, ...counted } = await spent()
        const each = Object.fromEntries(Object.entries(counted).map(([field, value]) => [field, value / result.count]))
        const sent = requests[contender.module]
        here[contender.module].push({
          ...result,
          serverUs: cpuUs / result.count,
          ...each,
          ...(sent && { requests: sent }),
        })
      }
    }
  }
  await Promise.all(running.map((contender) => contender.close()))
  return results
}

/** Acquires the names in another process: a service may know the names that it holds itself. */
async function takeAll(contenders, urls, count, prefixes) {
  for (const module of contenders) {
    const holder = await Contender.start(module, urls)
    await holder.ask({ what: 'take', count, prefix: prefixes.get(module) })
    await holder.kill()
  }
}
