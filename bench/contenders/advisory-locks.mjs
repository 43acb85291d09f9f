// PostgreSQL's advisory locks of a session, over a pool of `pg`: a lock keeps its connection.
import pg from 'pg'
import { sslOf } from '../ssl.mjs'

export const kind = 'code'
export const packages = ['pg']
export const does = 'owner check, by the connection; no fencing token, no ttl: the lock ends with the connection'
export const settings = {
  '': 'a pool of 10 connections; `pg_try_advisory_lock` and `pg_advisory_unlock`; waits with `pg_advisory_lock`',
}

/** The key of a name: PostgreSQL's hash of it, in 64 bits. */
const KEY = 'hashtextextended($1, 0)'
const prepared = (name, text) => (value) => ({ name, text, values: [value] })
const TRY = prepared('try', `SELECT pg_try_advisory_lock(${KEY}) AS got`)
const WAIT = prepared('wait', `SELECT pg_advisory_lock(${KEY})`)
const UNLOCK = prepared('unlock', `SELECT pg_advisory_unlock(${KEY}) AS done`)

export async function connect({ urls: [url], caFile }) {
  const pool = new pg.Pool({ connectionString: url, max: 10, ...sslOf(caFile) })
  const tryOnce = async (name) => {
    const client = await pool.connect()
    if ((await client.query(TRY(name))).rows[0].got) return client
    client.release()
  }
  const free = async (client, name) => {
    const { rows } = await client.query(UNLOCK(name))
    client.release()
    return rows[0].done
  }
  return {
    async pair(name) {
      const client = await tryOnce(name)
      if (!client) throw new Error(`${name} was busy`)
      if (!(await free(client, name))) throw new Error(`${name} was lost`)
    },
    async wait(name) {
      const client = await pool.connect()
      await client.query(WAIT(name))
      return () => free(client, name)
    },
    close: () => pool.end(),
  }
}
