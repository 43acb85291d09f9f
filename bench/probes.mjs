// Measures what a server does while a contender runs, on a separate connection before and after.
import net from 'node:net'
import { Monitor } from '../scripts/monitor.mjs'

const ASK = 'INFO everything\r\n'
const END = 'end-of-requests'

/** The probe of one or several Redis servers. */
export class RedisProbe {
  #servers

  static async open(...servers) {
    const probe = new RedisProbe()
    probe.#servers = await Promise.all(servers.map((server) => RedisConnection.open(server.port)))
    return probe
  }

  /** Starts a measurement. Resolves to a function that resolves to the totals since then. */
  async start() {
    const before = await Promise.all(this.#servers.map((server) => server.counted()))
    return async () => {
      const after = await Promise.all(this.#servers.map((server) => server.counted()))
      const total = (field) => after.reduce((sum, now, i) => sum + now[field] - before[i][field], 0)
      // Between the two INFO commands the server counts the first reply, the second request, and one command.
      const own = before.reduce((sum, { answerBytes }) => sum + answerBytes + ASK.length, 0)
      return { cpuUs: total('cpuUs'), commands: total('commands') - this.#servers.length, bytes: total('bytes') - own }
    }
  }

  /** Runs `run`, which resolves to a number of calls. Resolves to the number of commands per call that clients sent. */
  async requests(run) {
    const monitors = await Promise.all(this.#servers.map((server) => Monitor.open(server.port)))
    const count = await run()
    // MONITOR has the order of execution: this PING comes after all commands that are to be counted. Sentinels send others.
    await Promise.all(this.#servers.map((server) => server.ping(` ${END}`)))
    const sent = () => monitors.map(({ commands }) => commands.findIndex((command) => command.includes(`"${END}"`)))
    while (sent().includes(-1)) await new Promise((resolve) => setTimeout(resolve, 1))
    const total = sent().reduce((sum, length) => sum + length, 0)
    for (const monitor of monitors) monitor.close()
    return total / count
  }

  async version() {
    return `Redis ${await this.#servers[0].version()}`
  }

  close() {
    for (const server of this.#servers) server.close()
  }
}

/** A plain connection, so that the exact number of bytes of the measurement is known. */
export class RedisConnection {
  port = 0
  #socket
  #answered
  #buffer = ''

  static async open(port) {
    const connection = new RedisConnection()
    connection.port = port
    connection.#socket = net.connect(port, '127.0.0.1').setNoDelay(true).setEncoding('latin1')
    connection.#socket.on('data', (text) => connection.#receive(text))
    await new Promise((resolve, reject) => connection.#socket.once('connect', resolve).once('error', reject))
    return connection
  }

  #receive(text) {
    this.#buffer += text
    const bulk = /^\$(\d+)\r\n/.exec(this.#buffer)
    const isWhole = bulk ? this.#buffer.length >= bulk[0].length + Number(bulk[1]) + 2 : this.#buffer.endsWith('\r\n')
    if (!isWhole) return
    const answer = this.#buffer
    this.#buffer = ''
    this.#answered(answer)
  }

  #ask(command) {
    const answer = new Promise((resolve) => (this.#answered = resolve))
    this.#socket.write(command)
    return answer
  }

  ping(text = '') {
    return this.#ask(`PING${text}\r\n`)
  }

  async version() {
    return /redis_version:(\S+)/.exec(await this.#ask(ASK))?.[1]
  }

  async counted() {
    const answer = await this.#ask(ASK)
    const number = (field) => Number(new RegExp(`^${field}:(\\S+)`, 'm').exec(answer)?.[1])
    const seconds = ['', '_children'].reduce(
      (sum, whose) => sum + number(`used_cpu_user${whose}`) + number(`used_cpu_sys${whose}`),
      0,
    )
    return {
      cpuUs: seconds * 1e6,
      commands: number('total_commands_processed'),
      bytes: number('total_net_input_bytes') + number('total_net_output_bytes'),
      answerBytes: answer.length,
    }
  }

  close() {
    this.#socket.destroy()
  }
}

/** The probe of a MongoDB: CPU time and requests. */
export class MongoProbe {
  #client
  #admin

  static async open(server) {
    // Imported here: measurements of Redis do not need the driver.
    const { MongoClient } = await import('mongodb')
    const probe = new MongoProbe()
    probe.#client = await new MongoClient(server.url).connect()
    probe.#admin = probe.#client.db('admin')
    return probe
  }

  async #counted() {
    const { extra_info: spent, network } = await this.#admin.command({
      serverStatus: 1,
      wiredTiger: 0,
      metrics: 0,
      tcmalloc: 0,
    })
    return { cpuUs: Number(spent.user_time_us) + Number(spent.system_time_us), requests: Number(network.numRequests) }
  }

  async start() {
    const before = await this.#counted()
    return async () => {
      const after = await this.#counted()
      return { cpuUs: after.cpuUs - before.cpuUs, requests: after.requests - before.requests - 1 }
    }
  }

  async version() {
    const { version } = await this.#admin.command({ buildInfo: 1 })
    const { hosts } = await this.#admin.command({ hello: 1 })
    return `MongoDB ${version} (${hosts ? `replica set with ${hosts.length} member${hosts.length > 1 ? 's' : ''}, majority` : 'standalone'})`
  }

  close() {
    return this.#client.close()
  }
}
