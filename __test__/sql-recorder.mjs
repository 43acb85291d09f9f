// The recorder of waiters on an SQL server: one row has all records, and the number of waiters that hold the lock.

/** What the dialects do differently. `locks`: the table. `value`: a parameter. `clock`: the time of the server. */
export const DIALECTS = {
  postgres: {
    locks: 'holdfast.locks',
    value: '$1',
    clock: 'clock_timestamp()',
    inAMinute: "clock_timestamp() + interval '1 minute'",
    restMs: "1e3 * date_part('epoch', expires_at - clock_timestamp())",
    async open(url) {
      const { Pool } = /** @type {any} */ (await import('pg')).default
      // A client has no queue for the statements of several callers.
      const pool = new Pool({ connectionString: url, max: 1 })
      pool.on('error', () => {})
      return pool
    },
    // Several processes create the table at the same time.
    create: (client, log) =>
      client.query(`SELECT pg_advisory_xact_lock(1);
        CREATE TABLE IF NOT EXISTS ${log} (id int PRIMARY KEY, inside int, records text);
        INSERT INTO ${log} VALUES (1, 0, '') ON CONFLICT DO NOTHING`),
    async run(client, text, values) {
      const { rows, rowCount } = await client.query(text, values)
      return { rows, changed: rowCount }
    },
    async change(client, log, by, text) {
      const change = `UPDATE ${log} SET inside = inside + $1, records = records || $2 RETURNING inside`
      return (await client.query(change, [by, text])).rows[0].inside
    },
  },
  mysql: {
    locks: 'locks',
    value: '?',
    clock: '1e6 * UNIX_TIMESTAMP(SYSDATE(6))',
    inAMinute: '1e6 * UNIX_TIMESTAMP(SYSDATE(6)) + 6e7',
    restMs: '(expires_at - 1e6 * UNIX_TIMESTAMP(SYSDATE(6))) / 1e3',
    async open(url) {
      const { createConnection } = /** @type {any} */ (await import('mysql2/promise')).default
      return createConnection({ uri: url, multipleStatements: true })
    },
    create: (client, log) =>
      client.query(`CREATE TABLE IF NOT EXISTS ${log} (id int PRIMARY KEY, inside int, records text);
        INSERT IGNORE INTO ${log} VALUES (1, 0, '')`),
    async run(client, text, values) {
      const [rows] = await client.query(text, values)
      return { rows, changed: rows.affectedRows }
    },
    async change(client, log, by, text) {
      const change = `UPDATE ${log} SET inside = LAST_INSERT_ID(inside + ?), records = CONCAT(records, ?)`
      return (await client.query(change, [by, text]))[0].insertId
    },
  },
}

export class SqlRecorder {
  #dialect
  #log
  /** @type {Promise<any>} */
  #client

  /** @param {typeof DIALECTS.postgres} dialect */
  constructor(dialect, url, options, log) {
    this.#dialect = dialect
    this.#log = log
    this.prefix = options.keyPrefix ?? ''
    this.#client = dialect.open(url).then(async (client) => {
      await dialect.create(client, log)
      return client
    })
    // A test that does not use it sees no rejection.
    this.#client.catch(() => {})
  }

  async #change(by, text) {
    return this.#dialect.change(await this.#client, this.#log, by, text)
  }

  /** Records that a waiter holds the lock. Resolves to the number of recorded holders. */
  enter(label) {
    return this.#change(1, `${label}\n`)
  }

  leave() {
    return this.#change(-1, '')
  }

  record(text) {
    return this.#change(0, `${text}\n`)
  }

  async records() {
    const { rows } = await this.#dialect.run(await this.#client, `SELECT records FROM ${this.#log}`, [])
    return rows[0].records.split('\n').slice(0, -1)
  }

  key(name) {
    return `${this.prefix}${name}`
  }

  /** Executes a statement with the stored form of a name as its value. */
  async #of(name, text) {
    return this.#dialect.run(await this.#client, text, [Buffer.from(this.key(name))])
  }

  async positions(name) {
    const { locks, value, clock } = this.#dialect
    const text = `SELECT owner FROM ${locks}_waiters WHERE name = ${value} AND alive_until > ${clock} ORDER BY ticket`
    return (await this.#of(name, text)).rows.map(({ owner }) => owner)
  }

  async isFree(name) {
    const { locks, value, clock } = this.#dialect
    const text = `SELECT 1 FROM ${locks} WHERE name = ${value} AND owner IS NOT NULL AND expires_at > ${clock}`
    return (await this.#of(name, text)).rows.length === 0
  }

  async isUnused(name) {
    const { rows } = await this.#of(
      name,
      `SELECT 1 FROM ${this.#dialect.locks}_waiters WHERE name = ${this.#dialect.value}`,
    )
    return rows.length === 0 && (await this.isFree(name))
  }

  async remainingMs(name) {
    const { locks, value, restMs } = this.#dialect
    return Number((await this.#of(name, `SELECT ${restMs} AS rest FROM ${locks} WHERE name = ${value}`)).rows[0].rest)
  }

  async acquire(name) {
    const { locks, value, clock, inAMinute } = this.#dialect
    const text = `UPDATE ${locks} SET owner = 'theirs', expires_at = ${inAMinute} WHERE name = ${value} AND expires_at <= ${clock}`
    return (await this.#of(name, text)).changed === 1
  }

  async release(name) {
    const { locks, value, clock } = this.#dialect
    const text = `UPDATE ${locks} SET owner = NULL, expires_at = ${clock} WHERE name = ${value} AND owner = 'theirs'`
    await this.#of(name, text)
  }

  async close() {
    const client = await this.#client.catch(() => undefined)
    const cleared = client?.query(`DROP TABLE ${this.#log}`).catch(() => {})
    await Promise.race([cleared, new Promise((resolve) => setTimeout(resolve, 1000))])
    await client?.end().catch(() => {})
  }
}
