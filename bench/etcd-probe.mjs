// Measures what an etcd server does while a contender runs.
import { ServerProbe } from './server-probe.mjs'

export class EtcdProbe extends ServerProbe {
  #address

  constructor(server) {
    super(server)
    this.#address = `http://127.0.0.1:${server.port}`
  }

  async total() {
    const response = await fetch(`${this.#address}/metrics`)
    const counts = (await response.text()).matchAll(/^grpc_server_started_total\{.*\} (\S+)$/gm)
    return [...counts].reduce((sum, [, count]) => sum + Number(count), 0)
  }

  async version() {
    const response = await fetch(`${this.#address}/version`)
    return `etcd ${/** @type {any} */ (await response.json()).etcdserver}`
  }
}
