// The well-known gist on the official driver. Processes of their own import it, too.

/** A document per lock, a duplicate key means busy, and the TTL monitor frees what has expired. */
export class Gist {
  #locks

  constructor(collection) {
    this.#locks = collection
  }

  async start() {
    await this.#locks.createIndex({ expiresAt: 1 }, { expireAfterSeconds: 0 })
  }

  async acquireLock(name, ttlSeconds) {
    try {
      await this.#locks.insertOne({ _id: name, expiresAt: new Date(Date.now() + ttlSeconds * 1000) })
      return true
    } catch (error) {
      if (error.code === 11000) return false
      throw error
    }
  }

  async releaseLock(name) {
    await this.#locks.deleteOne({ _id: name })
  }
}
