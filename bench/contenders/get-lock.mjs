// GET_LOCK of MySQL and MariaDB, over a pool of `mysql2`: a lock keeps its connection.
import mysql from 'mysql2/promise'
import { sslOf } from '../ssl.mjs'

export const kind = 'code'
export const packages = ['mysql2']
export const does = 'owner check, by the connection; no fencing token, no ttl: the lock ends with the connection'
export const settings = {
  '': 'a pool of 10 connections; `GET_LOCK(name, 0)` and `RELEASE_LOCK`; waits with `GET_LOCK(name, 3600)`',
}

export async function connect({ urls: [url], caFile }) {
  const pool = mysql.createPool({ uri: url, connectionLimit: 10, ...sslOf(caFile) })
  /** Returns the connection that has the lock. */
  const lock = async (name, seconds) => {
    const connection = await pool.getConnection()
    const [rows] = await connection.execute('SELECT GET_LOCK(?, ?) AS got', [name, seconds])
    if (rows[0].got === 1) return connection
    connection.release()
    throw new Error(`${name} was busy`)
  }
  const free = async (connection, name) => {
    const [rows] = await connection.execute('SELECT RELEASE_LOCK(?) AS done', [name])
    connection.release()
    if (rows[0].done !== 1) throw new Error(`${name} was lost`)
    return true
  }
  return {
    async pair(name) {
      await free(await lock(name, 0), name)
    },
    async wait(name) {
      const connection = await lock(name, 3600)
      return () => free(connection, name)
    },
    close: () => pool.end(),
  }
}
