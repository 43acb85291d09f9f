// Another client of the store, for Redis, MongoDB and SQL servers: waiters record there that they are served, and tests read and change
// locks and queues.
import { MongoClient } from 'mongodb'
import { EtcdRecorder } from './etcd-recorder.mjs'
import { openRedis } from './redis-client.mjs'
import { DIALECTS, SqlRecorder } from './sql-recorder.mjs'
import { ZookeeperRecorder } from './zookeeper-client.mjs'

/** Opens the record `log` in the store `{ url, options }`. */
export function openRecorder({ url, options, log }) {
  const dialect = DIALECTS[url.split(':')[0]]
  if (url.startsWith('etcd')) return new EtcdRecorder(url, options, log)
  if (url.startsWith('zookeeper:')) return new ZookeeperRecorder(url, options, log)
  if (dialect) return new SqlRecorder(dialect, url, options, log)
  return url.startsWith('mongodb') ? new MongodbRecorder(url, options, log) : new RedisRecorder(url, options, log)
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
