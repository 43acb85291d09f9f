// The gist on the official driver. Child processes import it, too.

/** A lock is a document. A duplicate key means busy. The TTL monitor deletes expired documents. */
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
