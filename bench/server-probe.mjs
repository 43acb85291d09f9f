// What the probes of servers have in common that are processes of this machine and count their requests.
import { processUs } from './process-cpu.mjs'

/** A probe whose `total()` resolves to the number of requests so far, to which a question itself adds `own`. */
export class ServerProbe {
  #pid
  #own

  constructor({ pid }, own = 0) {
    this.#pid = pid
    this.#own = own
  }

  /** Starts a measurement. Resolves to a function that resolves to the CPU time since then. */
  async start() {
    const before = processUs(this.#pid)
    return async () => ({ cpuUs: processUs(this.#pid) - before })
  }

  /** Runs `run`, which resolves to a number of calls. Resolves to the number of requests per call. */
  async requests(run) {
    const counted = await this.count()
    const count = await run()
    return (await counted()) / count
  }

  /** Counts requests. Resolves to a function that resolves to their number since then. */
  async count() {
    const before = await this.total()
    return async () => (await this.total()) - before - this.#own
  }

  /** @returns {Promise<number>} */
  async total() {
    throw new Error('the probe of each store counts in its own way')
  }

  async close() {}
}
