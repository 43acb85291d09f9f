// A primary of MariaDB and its replica, for the driver of the suites.
import { startMariadb } from '../scripts/mysql.mjs'
import { withMysql } from './mysql-client.mjs'
import { startProxy } from './proxy.mjs'
import { until } from './tools.mjs'

/** Opens a connection. `body` gets a function that executes a statement, and resolves to its rows. */
export const connected = (url, body) => withMysql(url, (client) => body(async (text) => (await client.query(text))[0]))

/** Executes statements on one connection. Resolves to the rows of the last one. */
export const query = ({ url }, ...texts) =>
  connected(url, async (run) => {
    let rows = []
    for (const text of texts) rows = await run(text)
    return rows
  })

/** The settings of a binary log that is written to the disk at every commit. */
export const logged = (id) => ({ server_id: id, log_bin: 'log', sync_binlog: 1 })

/** Makes a replica receive what its primary has. The user `app` has no right to write to a replica. */
async function replicate(primary, replica) {
  await query(primary, 'CREATE USER app', 'GRANT ALL ON holdfast.* TO app')
  const master = `MASTER_HOST = '127.0.0.1', MASTER_PORT = ${primary.port}, MASTER_USER = 'holdfast'`
  await query(replica, `CHANGE MASTER TO ${master}, MASTER_USE_GTID = slave_pos`, 'START SLAVE')
  await until('the replica has the user', async () => {
    const [{ count }] = await query(replica, "SELECT COUNT(*) AS count FROM mysql.db WHERE user = 'app'")
    return count === 1
  })
}

/**
 * Starts a primary and its replica, which is read-only, behind one address. A commit waits for the replica, unless `isSynchronous` is
 * false, or the replica is away for longer than a minute. See `drivers/postgres.mjs`.
 */
export async function startPair({ isSynchronous = true } = {}) {
  /** @type {Awaited<ReturnType<typeof startMariadb>>[]} */
  const started = []
  try {
    // The primary waits for no replica while it starts.
    const primary = await startMariadb({ settings: logged(1) })
    started.push(primary)
    const replica = await startMariadb({ settings: { ...logged(2), read_only: 1, rpl_semi_sync_slave_enabled: 1 } })
    started.push(replica)
    await replicate(primary, replica)
    const attached = async () => {
      const status = "SHOW STATUS LIKE 'Rpl_semi_sync_master_clients'"
      await until('the replica is synchronous', async () => (await query(primary, status))[0].Value === '1')
    }
    if (isSynchronous) {
      const settings = { enabled: 1, wait_point: 'AFTER_SYNC', timeout: 60_000 }
      const texts = Object.entries(settings).map(
        ([name, value]) => `SET GLOBAL rpl_semi_sync_master_${name} = ${value}`,
      )
      await query(primary, ...texts)
      await attached()
    }
    const proxy = await startProxy(primary.port)
    const detach = () => query(replica, 'STOP SLAVE IO_THREAD')
    return {
      primary,
      replica,
      url: () => `mysql://app@127.0.0.1:${proxy.port}/holdfast`,
      releasesWait: true,
      detach,
      attach: () => query(replica, 'START SLAVE IO_THREAD'),
      // With AFTER_COMMIT, the default of MariaDB, other sessions see a commit before the replica has it.
      waitPoints: ['AFTER_SYNC', 'AFTER_COMMIT'].map(
        (point) => () => query(primary, `SET GLOBAL rpl_semi_sync_master_wait_point = ${point}`),
      ),
      async lose() {
        await primary.kill()
        proxy.target = replica.port
      },
      // The open connections still lead to the old primary.
      async refuseWrites() {
        await query(primary, 'SET GLOBAL read_only = 1')
        proxy.target = replica.port
      },
      /** Makes the replica accept writes, after it has executed what it has received. */
      async promote() {
        await detach()
        await until('the log is executed', async () => {
          const [status] = await query(replica, 'SHOW SLAVE STATUS')
          return status.Exec_Master_Log_Pos === status.Read_Master_Log_Pos
        })
        await query(replica, 'STOP SLAVE', 'RESET SLAVE ALL', 'SET GLOBAL read_only = 0')
      },
      stop: () => Promise.all([proxy.close(), ...started.map((server) => server.stop())]),
    }
  } catch (error) {
    await Promise.all(started.map((server) => server.stop()))
    throw error
  }
}
