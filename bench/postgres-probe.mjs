// Measures what a PostgreSQL server does while a contender runs.
import { setTimeout as sleep } from 'node:timers/promises'
import { ServerProbe } from './server-probe.mjs'

/** The settings with which a server can count statements. Until a measurement it counts nothing, which would cost time. */
export const COUNTING = {
  shared_preload_libraries: 'pg_stat_statements',
  'pg_stat_statements.track': 'none',
}
/** The time after which every connection has read the settings again. */
const RELOAD_MS = 200

export class PostgresProbe extends ServerProbe {
  #client

  static async open(server) {
    // Imported here: measurements of other stores do not need the driver.
    const { default: pg } = await import('pg')
    const probe = new PostgresProbe(server)
    probe.#client = new pg.Client({ connectionString: server.url })
    // The server stops after a failure of the run, which is not to be hidden by another one.
    probe.#client.on('error', () => {})
    await probe.#client.connect()
    await probe.#client.query('CREATE EXTENSION IF NOT EXISTS pg_stat_statements')
    return probe
  }

  /** Counts statements. Resolves to a function that resolves to their number since then. */
  async count() {
    await this.#track('all')
    await this.#client.query('SELECT pg_stat_statements_reset()')
    return async () => {
      const { rows } = await this.#client.query(
        "SELECT sum(calls)::float AS statements FROM pg_stat_statements WHERE query NOT LIKE '%pg_stat_statements%'",
      )
      await this.#track('none')
      return rows[0].statements ?? 0
    }
  }

  async #track(what) {
    await this.#client.query(`ALTER SYSTEM SET pg_stat_statements.track = '${what}'`)
    await this.#client.query('SELECT pg_reload_conf()')
    await sleep(RELOAD_MS)
  }

  async version() {
    const { rows } = await this.#client.query('SHOW server_version')
    return `PostgreSQL ${rows[0].server_version.split(' ')[0]}`
  }

  close() {
    return this.#client.end()
  }
}
