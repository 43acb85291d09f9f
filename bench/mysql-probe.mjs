// Measures what a MariaDB server does while a contender runs.
import { ServerProbe } from './server-probe.mjs'

export class MysqlProbe extends ServerProbe {
  #connection

  static async open(server) {
    // Imported here: measurements of other stores do not need the driver.
    const { default: mysql } = await import('mysql2/promise')
    const probe = new MysqlProbe(server, 1)
    probe.#connection = await mysql.createConnection(server.url)
    // The server stops after a failure of the run, which is not to be hidden by another one.
    probe.#connection.on('error', () => {})
    return probe
  }

  async total() {
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
