// The gist's class, as a reader has it: on any collection with `insertOne` and `deleteOne`.
export class DistributedLocks {
  #collection

  constructor(collection) {
    this.#collection = collection
  }

  async acquireLock(name, ttlSeconds) {
    const expiresAt = new Date(Date.now() + ttlSeconds * 1000)
    return this.#collection.insertOne({ _id: name, expiresAt }).then(
      () => true,
      () => false,
    )
  }

  async releaseLock(name) {
    await this.#collection.deleteOne({ _id: name })
  }

  async acquireAndExecute({ name, ttlSeconds }, fn) {
    if (!(await this.acquireLock(name, ttlSeconds))) return
    try {
      return await fn()
    } finally {
      await this.releaseLock(name)
    }
  }
}
