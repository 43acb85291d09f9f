// Another client of the store, for Redis, MongoDB and SQL servers: waiters record there that they are served, and tests read and change
// locks and queues.
import { MongoClient } from 'mongodb'
import { openRedis } from './redis-client.mjs'

/** Opens the record `log` in the store `{ url, options }`. */
export function openRecorder({ url, options, log }) {
  const scheme = /^(mongodb|postgres|mysql)?/.exec(url)?.[1] ?? 'redis'
  return new RECORDERS[scheme](url, options, log)
}

export class RedisRecorder {
  constructor(url, options, log) {
    this.redis = openRedis(url, { maxRetriesPerRequest: null })
    this.prefix = options.keyPrefix
    this.log = log
  }

  /** Records that a waiter holds the lock. Resolves to the number of recorded holders. */
  async enter(label) {
    const replies = await this.redis.multi().incr(`${this.log}:inside`).rpush(this.log, label).exec()
    return Number(replies?.[0][1])
  }

  async leave() {
    await this.redis.decr(`${this.log}:inside`)
  }

  async record(text) {
    await this.redis.rpush(this.log, text)
  }

  records() {
    return this.redis.lrange(this.log, 0, -1)
  }

  key(name) {
    return `${this.prefix}${name}`
  }

  queueKey(name) {
    return `holdfast:queue:{${this.key(name)}}`
  }

  /** Lists the positions in the queue of a name, first to last. */
  positions(name) {
    return this.redis.zrangebyscore(this.queueKey(name), 0, '+inf')
  }

  async isFree(name) {
    return (await this.redis.exists(this.key(name))) === 0
  }

  /** Whether a name has neither a holder nor a waiter. */
  async isUnused(name) {
    return (await this.redis.exists(this.key(name), this.queueKey(name))) === 0
  }

  /** The remaining time of a lease, in milliseconds. */
  remainingMs(name) {
    return this.redis.pttl(this.key(name))
  }

  /** Acquires a name as another tool would, if it is free. */
  async acquire(name) {
    return (await this.redis.set(this.key(name), 'theirs', 'PX', 60_000, 'NX')) !== null
  }

  async release(name) {
    await this.redis.del(this.key(name))
  }

  async close() {
    const cleared = this.redis.del(this.log, `${this.log}:inside`).catch(() => {})
    await Promise.race([cleared, new Promise((resolve) => setTimeout(resolve, 1000))])
    this.redis.disconnect()
  }
}

class MongodbRecorder {
  #client

  constructor(url, options, log) {
    // The server may be down when this is closed.
    this.#client = new MongoClient(url, { serverSelectionTimeoutMS: 5000 })
    this.prefix = options.keyPrefix ?? ''
    this.locks = this.#client.db().collection(options.collection ?? 'locks')
    this.log = this.#client.db().collection(log)
  }

  async #change(by, text) {
    const change = { $inc: { inside: by }, ...(text && { $push: { records: text } }) }
    const after = await this.log.findOneAndUpdate({ _id: 'log' }, change, { upsert: true, returnDocument: 'after' })
    return after.inside
  }

  enter(label) {
    return this.#change(1, label)
  }

  leave() {
    return this.#change(-1)
  }

  record(text) {
    return this.#change(0, text)
  }

  async records() {
    return (await this.log.findOne({ _id: 'log' }))?.records ?? []
  }

  key(name) {
    return `${this.prefix}${name}`
  }

  #document(name) {
    return this.locks.findOne({ _id: this.key(name) })
  }

  async positions(name) {
    return ((await this.#document(name))?.queue ?? []).map(({ owner }) => owner)
  }

  async isFree(name) {
    return (await this.#document(name)) === null
  }

  isUnused(name) {
    return this.isFree(name)
  }

  async remainingMs(name) {
    return (await this.#document(name)).expiresAt - Date.now()
  }

  async acquire(name) {
    try {
      await this.locks.insertOne({ _id: this.key(name), expiresAt: new Date(Date.now() + 60_000) })
      return true
    } catch (error) {
      if (error.code !== 11000) throw error
      return false
    }
  }

  async release(name) {
    await this.locks.deleteOne({ _id: this.key(name) })
  }

  async close() {
    const cleared = this.log.drop().catch(() => {})
    await Promise.race([cleared, new Promise((resolve) => setTimeout(resolve, 1000))])
    await this.#client.close(true)
  }
}

/** Of both dialects: one row has all records, and the number of waiters that hold the lock. */
class SqlRecorder {
  #client
  #log

  constructor(url, options, log) {
    this.prefix = options.keyPrefix ?? ''
    this.#log = log
    this.#client = this.open(url).then(async (client) => {
      await this.create(client, log)
      return client
    })
    // A test that does not use it sees no rejection.
    this.#client.catch(() => {})
  }

  key(name) {
    return Buffer.from(`${this.prefix}${name}`)
  }

  /** Executes a statement of the dialect. */
  async run(text, values = []) {
    return this.execute(await this.#client, text, values)
  }

  enter(label) {
    return this.change(this.#log, 1, `${label}\n`)
  }

  leave() {
    return this.change(this.#log, -1, '')
  }

  record(text) {
    return this.change(this.#log, 0, `${text}\n`)
  }

  async records() {
    const [{ records }] = await this.run(`SELECT records FROM ${this.#log}`)
    return records.split('\n').slice(0, -1)
  }

  async positions(name) {
    const text = `SELECT owner FROM locks_waiters WHERE name = ${this.value} AND alive_until > ${this.clock} ORDER BY ticket`
    return (await this.run(text, [this.key(name)])).map(({ owner }) => owner)
  }

  async isFree(name) {
    const text = `SELECT 1 FROM locks WHERE name = ${this.value} AND owner IS NOT NULL AND expires_at > ${this.clock}`
    return (await this.run(text, [this.key(name)])).length === 0
  }

  /** Whether a name has neither a holder nor a position. */
  async isUnused(name) {
    const rest = await this.run(`SELECT 1 FROM locks_waiters WHERE name = ${this.value}`, [this.key(name)])
    return rest.length === 0 && (await this.isFree(name))
  }

  async release(name) {
    const text = `UPDATE locks SET owner = NULL, expires_at = ${this.clock} WHERE name = ${this.value} AND owner = 'theirs'`
    await this.run(text, [this.key(name)])
  }

  async close() {
    const client = await this.#client.catch(() => undefined)
    const cleared = this.run(`DROP TABLE ${this.#log}`).catch(() => {})
    await Promise.race([cleared, new Promise((resolve) => setTimeout(resolve, 1000))])
    await client?.end().catch(() => {})
  }
}

class PostgresRecorder extends SqlRecorder {
  value = '$1'
  clock = 'clock_timestamp()'

  async open(url) {
    const { Pool } = /** @type {any} */ (await import('pg')).default
    // A client has no queue for the statements of several callers.
    const pool = new Pool({ connectionString: url, max: 1 })
    pool.on('error', () => {})
    return pool
  }

  /** Several processes create the table at the same time. */
  create(client, log) {
    return client.query(`SELECT pg_advisory_xact_lock(1);
      CREATE TABLE IF NOT EXISTS ${log} (id int PRIMARY KEY, inside int, records text);
      INSERT INTO ${log} VALUES (1, 0, '') ON CONFLICT DO NOTHING`)
  }

  async execute(client, text, values) {
    return (await client.query(text, values)).rows
  }

  async change(log, by, text) {
    const change = `UPDATE ${log} SET inside = inside + $1, records = records || $2 RETURNING inside`
    return (await this.run(change, [by, text]))[0].inside
  }

  async remainingMs(name) {
    const text = "SELECT 1e3 * date_part('epoch', expires_at - clock_timestamp()) AS rest FROM locks WHERE name = $1"
    return (await this.run(text, [this.key(name)]))[0].rest
  }

  async acquire(name) {
    const text = `UPDATE locks SET owner = 'theirs', expires_at = clock_timestamp() + interval '1 minute'
      WHERE name = $1 AND expires_at <= clock_timestamp() RETURNING name`
    return (await this.run(text, [this.key(name)])).length === 1
  }
}

class MysqlRecorder extends SqlRecorder {
  value = '?'
  clock = '1e6 * UNIX_TIMESTAMP(SYSDATE(6))'

  async open(url) {
    const { createConnection } = /** @type {any} */ (await import('mysql2/promise')).default
    return createConnection({ uri: url, multipleStatements: true })
  }

  create(client, log) {
    return client.query(`CREATE TABLE IF NOT EXISTS ${log} (id int PRIMARY KEY, inside int, records text);
      INSERT IGNORE INTO ${log} VALUES (1, 0, '')`)
  }

  async execute(client, text, values) {
    return (await client.query(text, values))[0]
  }

  async change(log, by, text) {
    const change = `UPDATE ${log} SET inside = LAST_INSERT_ID(inside + ?), records = CONCAT(records, ?)`
    return (await this.run(change, [by, text])).insertId
  }

  async remainingMs(name) {
    const text = `SELECT (expires_at - ${this.clock}) / 1e3 AS rest FROM locks WHERE name = ?`
    return Number((await this.run(text, [this.key(name)]))[0].rest)
  }

  async acquire(name) {
    const text = `UPDATE locks SET owner = 'theirs', expires_at = ${this.clock} + 6e7 WHERE name = ? AND expires_at <= ${this.clock}`
    return (await this.run(text, [this.key(name)])).affectedRows === 1
  }
}

const RECORDERS = { redis: RedisRecorder, mongodb: MongodbRecorder, postgres: PostgresRecorder, mysql: MysqlRecorder }
