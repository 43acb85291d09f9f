// Measures what an etcd server does while a contender runs.
import { processUs } from './process-cpu.mjs'

export class EtcdProbe {
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
    const before = await this.#requests()
    return async () => (await this.#requests()) - before
  }

  async #requests() {
    const response = await fetch(`http://127.0.0.1:${this.#server.port}/metrics`)
    const counts = (await response.text()).matchAll(/^grpc_server_started_total\{.*\} (\S+)$/gm)
    return [...counts].reduce((sum, [, count]) => sum + Number(count), 0)
  }

  async version() {
    const response = await fetch(`http://127.0.0.1:${this.#server.port}/version`)
    return `etcd ${/** @type {any} */ (await response.json()).etcdserver}`
  }

  async close() {}
}
