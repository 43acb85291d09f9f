// A primary of MariaDB and its replica, for the tests.
import { startMariadb } from '../scripts/mysql.mjs'
import { withMysql } from './mysql-client.mjs'
import { until } from './tools.mjs'

/** Executes statements. Resolves to the rows of the last one. @param {{ url: string }} server @param {string[]} texts */
export const query = (server, ...texts) =>
  withMysql(server.url, async (client) => {
    let rows = []
    for (const text of texts) [rows] = await client.query(text)
    return rows
  })

/** The settings of a binary log that is written to the disk at every commit. @param {number} id */
export const logged = (id) => ({ server_id: id, log_bin: 'log', sync_binlog: 1 })
const SEMI_SYNC = { rpl_semi_sync_master_enabled: 1, rpl_semi_sync_master_wait_point: 'AFTER_SYNC' }

/**
 * Starts a primary and its replica, which is read-only. A commit waits for the replica, unless `isSynchronous` is false, or the replica is away
 * for longer than a minute. The user `app` has no right to write to a replica.
 */
export async function startPair({ isSynchronous = true } = {}) {
  const settings = isSynchronous ? { ...SEMI_SYNC, rpl_semi_sync_master_timeout: 60_000 } : {}
  /** @type {Awaited<ReturnType<typeof startMariadb>>[]} */
  const started = []
  const stop = () => Promise.all(started.map((server) => server.stop()))
  try {
    // The primary waits for no replica while it starts.
    const primary = await startMariadb({ settings: logged(1) })
    started.push(primary)
    const replica = await startMariadb({ settings: { ...logged(2), read_only: 1, rpl_semi_sync_slave_enabled: 1 } })
    started.push(replica)
    await query(primary, 'CREATE USER app', 'GRANT ALL ON holdfast.* TO app')
    await query(
      replica,
      `CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = ${primary.port}, MASTER_USER = 'holdfast', MASTER_USE_GTID = slave_pos`,
      'START SLAVE',
    )
    await until('the replica has the user', async () => {
      const [{ count }] = await query(replica, "SELECT COUNT(*) AS count FROM mysql.db WHERE user = 'app'")
      return count === 1
    })
    for (const [name, value] of Object.entries(settings)) await query(primary, `SET GLOBAL ${name} = ${value}`)
    if (isSynchronous) {
      await until('the replica is synchronous', async () => {
        const [{ Value }] = await query(primary, "SHOW STATUS LIKE 'Rpl_semi_sync_master_clients'")
        return Value === '1'
      })
    }
    return { primary, replica, stop }
  } catch (error) {
    await stop()
    throw error
  }
}

/** Makes a replica accept writes, after it has executed what it has received. @param {{ url: string }} replica */
export async function promote(replica) {
  await query(replica, 'STOP SLAVE IO_THREAD')
  await until('the log is executed', async () => {
    const [status] = await query(replica, 'SHOW SLAVE STATUS')
    return status.Exec_Master_Log_Pos === status.Read_Master_Log_Pos
  })
  await query(replica, 'STOP SLAVE', 'RESET SLAVE ALL', 'SET GLOBAL read_only = 0')
}
