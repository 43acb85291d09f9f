// Long cases on MariaDB for `npm run soak`: a full disk.
import { startMariadb } from '../../scripts/mysql.mjs'
import { withMysql } from '../mysql-client.mjs'
import { logged } from '../mysql-replication.mjs'
import { onFullDisk } from './disk.mjs'

const isUp = ({ url }) => withMysql(url, (client) => client.query('SELECT 1'))

/** The disk is full: calls are granted or reject with a retryable error, and are granted again when there is room. */
export const diskFull = () => onFullDisk({ bytes: 200 * 2 ** 20, start: () => startMariadb(), isUp })

/** The same with a binary log: a commit that cannot be logged fails. */
export const logDiskFull = () =>
  onFullDisk({
    bytes: 200 * 2 ** 20,
    start: () => startMariadb({ settings: logged(1) }),
    isUp,
  })
