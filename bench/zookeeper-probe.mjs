// Measures what a ZooKeeper server does while a contender runs.
import { ask } from '../scripts/zookeeper.mjs'
import { processUs } from './process-cpu.mjs'

export class ZookeeperProbe {
  #server

  constructor(server) {
    this.#server = server
  }

  async start() {
    const before = processUs(this.#server.pid)
    return async () => ({ cpuUs: processUs(this.#server.pid) - before })
  }

  /** Runs `run`, which resolves to a number of calls. Resolves to the number of requests per call. */
  async requests(run) {
    const counted = await this.count()
    const count = await run()
    return (await counted()) / count
  }

  /** Counts requests. Resolves to a function that resolves to their number since then. */
  async count() {
    // The server counts the question, too.
    const before = (await this.#received()) + 1
    return async () => (await this.#received()) - before
  }

  async #received() {
    return Number(/^Received: (\d+)$/m.exec(await ask(this.#server.port, 'srvr'))?.[1])
  }

  async version() {
    return `ZooKeeper ${/^Zookeeper version: ([\d.]+)/m.exec(await ask(this.#server.port, 'srvr'))?.[1]}`
  }

  async close() {}
}
