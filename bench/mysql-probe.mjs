// Measures what a MariaDB server does while a contender runs.
import { processUs } from './process-cpu.mjs'

export class MysqlProbe {
  #connection
  #pid

  static async open(server) {
    // Imported here: measurements of other stores do not need the driver.
    const { default: mysql } = await import('mysql2/promise')
    const probe = new MysqlProbe()
    probe.#pid = server.pid
    probe.#connection = await mysql.createConnection(server.url)
    // The server stops after a failure of the run, which is not to be hidden by another one.
    probe.#connection.on('error', () => {})
    return probe
  }

  async start() {
    const before = processUs(this.#pid)
    return async () => ({ cpuUs: processUs(this.#pid) - before })
  }

  /** Runs `run`, which resolves to a number of calls. Resolves to the number of statements per call. */
  async requests(run) {
    const counted = await this.count()
    const count = await run()
    return (await counted()) / count
  }

  /** Counts statements. Resolves to a function that resolves to their number since then. */
  async count() {
    const before = await this.#statements()
    // Without the one that counts.
    return async () => (await this.#statements()) - before - 1
  }

  async #statements() {
    const [rows] = await this.#connection.query("SHOW GLOBAL STATUS LIKE 'Questions'")
    return Number(rows[0].Value)
  }

  async version() {
    const [rows] = await this.#connection.query('SELECT version() AS version')
    return `MariaDB ${rows[0].version.split('-')[0]}`
  }

  close() {
    return this.#connection.end()
  }
}
