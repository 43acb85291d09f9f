// A primary of PostgreSQL and its standby, for the driver of the suites.
import { startPostgres } from '../scripts/postgres.mjs'
import { withPostgres } from './postgres-client.mjs'
import { until } from './tools.mjs'

/** Opens a connection. `body` gets a function that executes a statement, and resolves to its rows. */
export const connected = (url, body) =>
  withPostgres(url, (client) => body(async (text, values) => (await client.query(text, values)).rows))

/** Executes statements on one connection. Resolves to the rows of the last one. */
export const query = ({ url }, ...texts) =>
  connected(url, async (run) => {
    let rows = []
    for (const text of texts) rows = await run(text)
    return rows
  })

/** Changes a setting of a server that runs. */
export const set = (server, name, value) =>
  connected(server.url, async (run) => {
    await run(`ALTER SYSTEM SET ${name} = '${value.replaceAll("'", "''")}'`)
    await run('SELECT pg_reload_conf()')
    await until(`${name} is ${value}`, async () => (await run(`SHOW ${name}`))[0][name] === value)
  })

/** The URL of servers, of which one is the primary. */
export const urlOf = (...servers) =>
  `postgres://holdfast@${servers.map(({ port }) => `127.0.0.1:${port}`).join(',')}/postgres?sslmode=disable`

/**
 * Starts a primary and its standby. A commit waits for both, unless `isSynchronous` is false. `detach()` keeps the standby from receiving
 * more, and `attach()` ends that. `cancel()` cancels a statement that waits for the standby, as an operator would: the server then commits
 * without it. `lose()` ends the primary, `refuseWrites()` makes it read-only, and `promote()` makes the
 * standby the primary.
 */
export async function startPair({ isSynchronous = true } = {}) {
  const primary = await startPostgres({
    settings: { synchronous_standby_names: "'*'", synchronous_commit: 'local' },
  })
  try {
    const settings = { synchronous_standby_names: "''", wal_retrieve_retry_interval: 100 }
    const standby = await startPostgres({ standbyOf: primary, settings })
    const replicas = () => query(primary, "SELECT pid FROM pg_stat_replication WHERE sync_state = 'sync'")
    const attached = () => until('the standby is synchronous', async () => (await replicas()).length > 0)
    await attached()
    if (isSynchronous) await set(primary, 'synchronous_commit', 'remote_apply')
    const [{ primary_conninfo: conninfo }] = await query(standby, 'SHOW primary_conninfo')
    return {
      primary,
      replica: standby,
      url: () => urlOf(primary, standby),
      async detach() {
        await set(standby, 'primary_conninfo', '')
        await until('the standby is away', async () => (await replicas()).length === 0)
      },
      async attach() {
        await set(standby, 'primary_conninfo', conninfo)
        await attached()
      },
      async cancel() {
        const waits = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        await until('a cancelled statement', async () => (await query(primary, waits)).length > 0)
      },
      lose: () => primary.kill(),
      refuseWrites: () => set(primary, 'default_transaction_read_only', 'on'),
      promote: () => query(standby, 'SELECT pg_promote()'),
      stop: () => Promise.all([primary.stop(), standby.stop()]),
    }
  } catch (error) {
    await primary.stop()
    throw error
  }
}
