// The recorder of waiters on etcd: one key has all records, and the number of waiters that hold the lock.
import { EtcdClient } from './etcd-client.mjs'

export class EtcdRecorder {
  constructor(url, options, log) {
    this.client = new EtcdClient(url)
    this.prefix = options.keyPrefix ?? ''
    this.log = `recorder/${log}`
  }

  async #change(by, ...texts) {
    for (;;) {
      const before = await this.client.get(this.log)
      const { inside, records } = before ? JSON.parse(before.value) : { inside: 0, records: [] }
      const after = { inside: inside + by, records: [...records, ...texts] }
      if (await this.client.put(this.log, JSON.stringify(after), before?.changed ?? 0)) return after.inside
    }
  }

  /** Records that a waiter holds the lock. Resolves to the number of recorded holders. */
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
    const stored = await this.client.get(this.log)
    return stored ? JSON.parse(stored.value).records : []
  }

  key(name) {
    return `${this.prefix}${name}`
  }

  async #entries(name) {
    const found = await this.client.list(`${this.key(name)}/`)
    const place = ({ created, value }) => created * 64 + (value ? (JSON.parse(value).n ?? 0) : 0)
    return found.sort((one, other) => place(one) - place(other))
  }

  /** The entries behind the oldest one, which holds the name. */
  async positions(name) {
    return (await this.#entries(name)).slice(1).map(({ key }) => key)
  }

  async isFree(name) {
    return (await this.#entries(name)).length === 0
  }

  isUnused(name) {
    return this.isFree(name)
  }

  async remainingMs(name) {
    const [holder] = await this.#entries(name)
    return 1000 * (await this.client.rest(holder.lease))
  }

  /** Acquires a name as another tool would, if it is free. */
  async acquire(name) {
    const lease = await this.client.lease(60)
    return this.client.put(`${this.key(name)}/theirs`, '', 0, lease, `${this.key(name)}0`)
  }

  release(name) {
    return this.client.delete(`${this.key(name)}/theirs`)
  }

  async close() {
    const cleared = this.client.delete(this.log).catch(() => {})
    await Promise.race([cleared, new Promise((resolve) => setTimeout(resolve, 1000))])
  }
}
