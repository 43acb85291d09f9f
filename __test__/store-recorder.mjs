// What waiters write down in the store that they wait in, and what the tests look up there behind the addon's back: the
// same questions to Redis and to MongoDB.
import Redis from 'ioredis'
import { MongoClient } from 'mongodb'

/** Opens the ledger called `log` beside the locks of a store `{ url, options }`. */
export function openRecorder({ url, options, log }) {
  return url.startsWith('mongodb') ? new MongodbRecorder(url, options, log) : new RedisRecorder(url, options, log)
}

class RedisRecorder {
  constructor(url, options, log) {
    /** Another tool's connection. */
    this.redis = new Redis(url, { maxRetriesPerRequest: null })
    this.redis.on('error', () => {})
    this.prefix = options.keyPrefix
    this.log = log
  }

  /** Writes a line, and says how many are inside now. */
  async enter(as) {
    const [[, inside]] = await this.redis.multi().incr(`${this.log}:inside`).rpush(this.log, as).exec()
    return inside
  }

  async leave() {
    await this.redis.decr(`${this.log}:inside`)
  }

  async write(line) {
    await this.redis.rpush(this.log, line)
  }

  lines() {
    return this.redis.lrange(this.log, 0, -1)
  }

  key(name) {
    return `${this.prefix}${name}`
  }

  queueKey(name) {
    return `holdfast:queue:{${this.key(name)}}`
  }

  /** The places in the queue of a name, first to last. */
  places(name) {
    return this.redis.zrangebyscore(this.queueKey(name), 0, '+inf')
  }

  async isFree(name) {
    return (await this.redis.exists(this.key(name))) === 0
  }

  /** Whether nobody holds a name or waits for it. */
  async isOver(name) {
    return (await this.redis.exists(this.key(name), this.queueKey(name))) === 0
  }

  /** How long a lease lasts, in milliseconds. */
  remainingMs(name) {
    return this.redis.pttl(this.key(name))
  }

  /** Another tool takes a name, if it is free. */
  async takes(name) {
    return (await this.redis.set(this.key(name), 'theirs', 'PX', 60_000, 'NX')) !== null
  }

  async frees(name) {
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
    // The server may be gone when this is closed.
    this.#client = new MongoClient(url, { serverSelectionTimeoutMS: 5000 })
    this.prefix = options.keyPrefix ?? ''
    this.locks = this.#client.db().collection(options.collection ?? 'locks')
    this.ledger = this.#client.db().collection(log)
  }

  async #change(by, line) {
    const change = { $inc: { inside: by }, ...(line && { $push: { lines: line } }) }
    const after = await this.ledger.findOneAndUpdate({ _id: 'log' }, change, { upsert: true, returnDocument: 'after' })
    return after.inside
  }

  enter(as) {
    return this.#change(1, as)
  }

  leave() {
    return this.#change(-1)
  }

  write(line) {
    return this.#change(0, line)
  }

  async lines() {
    return (await this.ledger.findOne({ _id: 'log' }))?.lines ?? []
  }

  key(name) {
    return `${this.prefix}${name}`
  }

  #document(name) {
    return this.locks.findOne({ _id: this.key(name) })
  }

  async places(name) {
    return ((await this.#document(name))?.queue ?? []).map(({ owner }) => owner)
  }

  async isFree(name) {
    return (await this.#document(name)) === null
  }

  isOver(name) {
    return this.isFree(name)
  }

  async remainingMs(name) {
    return (await this.#document(name)).expiresAt - Date.now()
  }

  async takes(name) {
    try {
      await this.locks.insertOne({ _id: this.key(name), expiresAt: new Date(Date.now() + 60_000) })
      return true
    } catch (error) {
      if (error.code !== 11000) throw error
      return false
    }
  }

  async frees(name) {
    await this.locks.deleteOne({ _id: this.key(name) })
  }

  async close() {
    const cleared = this.ledger.drop().catch(() => {})
    await Promise.race([cleared, new Promise((resolve) => setTimeout(resolve, 1000))])
    await this.#client.close(true)
  }
}
