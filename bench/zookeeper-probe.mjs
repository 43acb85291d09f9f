// Measures what a ZooKeeper server does while a contender runs.
import { ask } from '../scripts/zookeeper.mjs'
import { ServerProbe } from './server-probe.mjs'

export class ZookeeperProbe extends ServerProbe {
  #port

  constructor(server) {
    super(server, 1)
    this.#port = server.port
  }

  async total() {
    return Number(/^Received: (\d+)$/m.exec(await ask(this.#port, 'srvr'))?.[1])
  }

  async version() {
    return `ZooKeeper ${/^Zookeeper version: ([\d.]+)/m.exec(await ask(this.#port, 'srvr'))?.[1]}`
  }
}
