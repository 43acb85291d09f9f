// Two writes of one row, over a pool: no lock. With one in flight, a lock that is stored cannot cost less.
export const kind = 'driver'
export const packages = ['pg', 'mysql2']
export const does = 'no lock: one row is written twice, each time in a commit of its own'
export const settings = {
  '': 'a pool of 10 connections, prepared statements; on PostgreSQL the second commit does not wait for the disk, as that of a release',
}

const TABLE = 'bare_commits (name varchar(64) NOT NULL PRIMARY KEY, owner integer)'

export const connect = ({ urls: [url] }) => (url.startsWith('postgres') ? onPostgres(url) : onMysql(url))

async function onPostgres(url) {
  const { default: pg } = await import('pg')
  const pool = new pg.Pool({ connectionString: url, max: 10 })
  await pool.query(`CREATE TABLE IF NOT EXISTS ${TABLE}`)
  const first = 'INSERT INTO bare_commits VALUES ($1, 1) ON CONFLICT (name) DO UPDATE SET owner = 1'
  const second = `UPDATE bare_commits SET owner = NULL WHERE name = $1 RETURNING set_config('synchronous_commit', 'off', true)`
  return {
    async pair(name) {
      for (const [step, text] of Object.entries({ first, second })) {
        // The types know no prepared statements.
        const query = /** @type {any} */ ({ name: step, text, values: [name] })
        const { rowCount } = await pool.query(query)
        if (rowCount !== 1) throw new Error(`${name} was not written`)
      }
    },
    close: () => pool.end(),
  }
}

async function onMysql(url) {
  const { default: mysql } = await import('mysql2/promise')
  const pool = mysql.createPool({ uri: url, connectionLimit: 10 })
  await pool.query(`CREATE TABLE IF NOT EXISTS ${TABLE}`)
  const first = 'INSERT INTO bare_commits VALUES (?, 1) ON DUPLICATE KEY UPDATE owner = 1'
  const second = 'UPDATE bare_commits SET owner = NULL WHERE name = ?'
  return {
    async pair(name) {
      for (const text of [first, second]) {
        const [result] = await pool.execute(text, [name])
        if (!('affectedRows' in result) || result.affectedRows === 0) throw new Error(`${name} was not written`)
      }
    },
    close: () => pool.end(),
  }
}
