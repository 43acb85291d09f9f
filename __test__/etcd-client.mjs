// Another client of etcd, by its JSON gateway.

/** @param {unknown} text */
const encoded = (text) => Buffer.from(String(text)).toString('base64')
const decoded = (/** @type {string} */ text = '') => Buffer.from(text, 'base64').toString()

/** A client of the first server of a URL. */
export class EtcdClient {
  /** @param {string} url */
  constructor(url) {
    const [, server] = /** @type {RegExpExecArray} */ (/^etcd:\/\/([^,/]+)/.exec(url))
    this.address = `http://${server}/v3`
  }

  /** @param {string} path @param {unknown} request @returns {Promise<any>} */
  async call(path, request) {
    const response = await fetch(`${this.address}/${path}`, { method: 'POST', body: JSON.stringify(request) })
    const answer = /** @type {any} */ (await response.json())
    if (!response.ok) throw new Error(`etcd: ${answer.error ?? answer.message}`)
    return answer
  }

  /** Lists the entries under a prefix, oldest first. @param {string} prefix */
  async list(prefix) {
    const end = prefix.slice(0, -1) + String.fromCodePoint((prefix.codePointAt(prefix.length - 1) ?? 0) + 1)
    const range = { key: encoded(prefix), range_end: encoded(end), sort_order: 'ASCEND', sort_target: 'CREATE' }
    const { kvs = [] } = await this.call('kv/range', range)
    return kvs.map((/** @type {any} */ kv) => ({
      key: decoded(kv.key),
      value: decoded(kv.value),
      lease: kv.lease,
      created: Number(kv.create_revision),
      changed: kv.mod_revision,
    }))
  }

  /** @param {string} key */
  async get(key) {
    const { kvs: [kv] = [] } = await this.call('kv/range', { key: encoded(key) })
    return kv && { value: decoded(kv.value), changed: kv.mod_revision }
  }

  /**
   * Writes a key if it has not changed since the revision `changed` (`0`: if it is absent). `alone`: only if there is no key from the
   * folder of the key up to this one. Resolves to whether it was written.
   *
   * @param {string} key @param {unknown} value @param {string | number} changed @param {string} [lease] @param {string} [alone]
   */
  async put(key, value, changed, lease, alone) {
    const folder = encoded(key.slice(0, key.lastIndexOf('/') + 1))
    const compare = alone
      ? [{ key: folder, range_end: encoded(alone), target: 'CREATE', create_revision: '0' }]
      : [{ key: encoded(key), target: 'MOD', mod_revision: String(changed) }]
    const success = [{ request_put: { key: encoded(key), value: encoded(value), lease } }]
    return (await this.call('kv/txn', { compare, success })).succeeded === true
  }

  /** @param {string} key @param {string} [end] */
  delete(key, end) {
    return this.call('kv/deleterange', { key: encoded(key), range_end: end && encoded(end) })
  }

  /** Grants a lease. Resolves to its id. @param {number} seconds */
  async lease(seconds) {
    return (await this.call('lease/grant', { TTL: String(seconds) })).ID
  }

  /** The rest of a lease in seconds. @param {string} id */
  async rest(id) {
    return Number((await this.call('lease/timetolive', { ID: id })).TTL)
  }

  /**
   * Adds entries to the folder of a name, of `size` bytes each. Resolves to a function that removes them.
   *
   * @param {string} key @param {number} count
   */
  async addEntries(key, count, size = 0) {
    const value = encoded('x'.repeat(size))
    const each = size > 0 ? 1 : 100
    for (let entry = 0; entry < count; entry += each) {
      const put = (/** @type {number} */ index) => ({ request_put: { key: encoded(`${key}/other-${index}`), value } })
      await this.call('kv/txn', { success: Array.from({ length: each }, (_, index) => put(entry + index)) })
    }
    return () => this.delete(`${key}/other-`, `${key}/other.`)
  }

  /** Removes the history up to now. */
  async compact() {
    const { header } = await this.call('kv/range', { key: 'AA==' })
    await this.call('kv/compaction', { revision: header.revision, physical: true })
  }
}
