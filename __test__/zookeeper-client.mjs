// A client of ZooKeeper that is not holdfast's: for what other programs store, read and change.
import net from 'node:net'
import { until } from './tools.mjs'

/** Opcodes of `ZooDefs.java`. */
const OPS = {
  create: 1,
  delete: 2,
  exists: 3,
  getData: 4,
  setData: 5,
  setACL: 7,
  getChildren: 8,
  createContainer: 19,
  auth: 100,
  close: -11,
}
const ALL = 31
/** The number and the opcode of a ping, which keeps the session. */
const PING = -2
const PING_OP = 11
/** @typedef {{ perms: number, scheme: string, id: string }} Acl */
/** @type {Acl[]} */
const EVERYONE = [{ perms: ALL, scheme: 'world', id: 'anyone' }]

const int = (/** @type {number} */ value) => {
  const bytes = Buffer.alloc(4)
  bytes.writeInt32BE(value)
  return bytes
}
const long = (/** @type {bigint} */ value) => {
  const bytes = Buffer.alloc(8)
  bytes.writeBigInt64BE(value)
  return bytes
}
const text = (/** @type {string | Buffer} */ value) =>
  Buffer.concat([int(Buffer.byteLength(value)), Buffer.from(value)])
const flag = (/** @type {boolean} */ value) => Buffer.from([Number(value)])
const list = (/** @type {Acl[]} */ acls) =>
  Buffer.concat([int(acls.length), ...acls.flatMap(({ perms, scheme, id }) => [int(perms), text(scheme), text(id)])])

class ZookeeperClient {
  #socket
  #input = Buffer.alloc(0)
  #number = 0
  /** @type {((frame: Buffer) => void)[]} */
  #waiting = []
  /** @type {Error | undefined} */
  #failure

  /** @param {net.Socket} socket */
  constructor(socket) {
    this.#socket = socket
    socket.on('data', (data) => this.#receive(data))
    socket
      .on('error', (error) => (this.#failure = error))
      .on('close', () => this.#waiting.splice(0).forEach((give) => give(Buffer.alloc(0))))
  }

  /** @param {Buffer} data */
  #receive(data) {
    this.#input = Buffer.concat([this.#input, data])
    while (this.#input.length >= 4 && this.#input.length >= 4 + this.#input.readInt32BE(0)) {
      const length = this.#input.readInt32BE(0)
      // The replies to pings have no receiver.
      if (this.#input.readInt32BE(4) !== PING) this.#waiting.shift()?.(this.#input.subarray(4, 4 + length))
      this.#input = this.#input.subarray(4 + length)
    }
  }

  /** @param {Buffer} body @returns {Promise<Buffer>} */
  #ask(body) {
    return new Promise((resolve, reject) => {
      this.#waiting.push((frame) =>
        frame.length > 0 ? resolve(frame) : reject(this.#failure ?? new Error('the connection was closed')),
      )
      this.#socket.write(text(body))
    })
  }

  async open(timeoutMs = 10_000) {
    await this.#ask(Buffer.concat([int(0), long(0n), int(timeoutMs), long(0n), text(Buffer.alloc(16)), flag(false)]))
    setInterval(() => this.#socket.write(text(Buffer.concat([int(PING), int(PING_OP)]))), timeoutMs / 5).unref()
    return this
  }

  /** @param {keyof typeof OPS} op @param {Buffer[]} parts */
  async #call(op, ...parts) {
    const number = op === 'auth' ? -4 : ++this.#number
    const frame = await this.#ask(Buffer.concat([int(number), int(OPS[op]), ...parts]))
    const code = frame.readInt32BE(12)
    if (code !== 0) throw Object.assign(new Error(`${op}: error ${code}`), { code })
    return frame.subarray(16)
  }

  /** Creates a node. `flags`: 1 ephemeral, 2 sequential. Resolves to its path. @param {string} path */
  async create(path, data = '', flags = 0, acl = EVERYONE) {
    const reply = await this.#call('create', text(path), text(data), list(acl), int(flags))
    return reply.toString('utf8', 4)
  }

  /** @param {string} path */
  createContainer = (path) => this.#call('createContainer', text(path), text(''), list(EVERYONE), int(4))
  /** @param {string} path */
  delete = (path) => this.#call('delete', text(path), int(-1))
  /** @param {string} path @param {Acl[]} acl */
  setAcl = (path, acl) => this.#call('setACL', text(path), list(acl), int(-1))
  /** @param {string} login */
  addAuth = (login) => this.#call('auth', int(0), text('digest'), text(login))

  /** @param {string} path */
  async data(path) {
    const reply = await this.#call('getData', text(path), flag(false))
    return reply.toString('utf8', 4, 4 + Math.max(0, reply.readInt32BE(0)))
  }

  /** Resolves to the names of a node's children; an empty list without the node. @param {string} path */
  async children(path) {
    const reply = await this.#call('getChildren', text(path), flag(false)).catch((error) => {
      if (error.code === -101) return int(0)
      throw error
    })
    const names = []
    for (let at = 4, left = reply.readInt32BE(0); left > 0; left--) {
      const length = reply.readInt32BE(at)
      names.push(reply.toString('utf8', at + 4, at + 4 + length))
      at += 4 + length
    }
    return names
  }

  async close() {
    await this.#call('close').catch(() => {})
    this.#socket.destroy()
  }
}

/**
 * Opens a client at the first server of a URL, with a session of its own, and closes it after `use`.
 *
 * @template T
 * @param {string} url
 * @param {(client: ZookeeperClient) => Promise<T>} use
 * @returns {Promise<T>}
 */
export async function withZookeeper(url, use) {
  const client = await openZookeeper(url)
  try {
    return await use(client)
  } finally {
    await client.close()
  }
}

/** @param {string} url */
export async function openZookeeper(url) {
  const [, host, port] = /^zookeeper:\/\/(?:[^/]*@)?([^:,/]+):(\d+)/.exec(url) ?? []
  const socket = net.connect(Number(port), host)
  socket.setNoDelay(true)
  return new ZookeeperClient(socket).open()
}

/** How holdfast writes a name as the name of a node. @param {string} name */
export const folderOf = (name) =>
  [...Buffer.from(name)]
    .map((byte) =>
      /[\w.:-]/.test(String.fromCharCode(byte))
        ? String.fromCharCode(byte)
        : `%${byte.toString(16).toUpperCase().padStart(2, '0')}`,
    )
    .join('')

/** The number of an entry, by which it has its place. @param {string} entry */
const numberOf = (entry) => Number(entry.slice(-10))

/** Lists the entries of a name, the oldest first. @param {ZookeeperClient} client @param {string} folder */
export const entriesOf = async (client, folder) =>
  (await client.children(folder)).sort((a, b) => numberOf(a) - numberOf(b))

/**
 * Adds entries to the folder of a name, with `size` bytes more in each of their names. Resolves to a function that removes them.
 *
 * @param {string} url @param {string} folder @param {number} count
 */
export async function addEntries(url, folder, count, size = 0) {
  const entry = `${folder}/other-${'x'.repeat(size)}`
  const entries = await withZookeeper(url, async (client) => {
    await client.createContainer(folder).catch(() => {})
    return Promise.all(Array.from({ length: count }, () => client.create(entry, '', 2)))
  })
  return () => withZookeeper(url, (client) => Promise.all(entries.map(client.delete)))
}

/**
 * Sets a quota of nodes for a folder, and creates nodes there until it is exceeded. Resolves to a function that removes the quota.
 *
 * @param {string} url @param {string} folder @param {number} count
 */
export async function fillQuota(url, folder, count) {
  const quota = `/zookeeper/quota${folder}`
  await withZookeeper(url, async (client) => {
    await client.create(quota)
    await client.create(`${quota}/zookeeper_limits`, `count=-1,bytes=-1=;byteHardLimit=-1;countHardLimit=${count}`)
    await client.create(`${quota}/zookeeper_stats`, 'count=1,bytes=0')
    const create = () => client.create(`${folder}/full-`, '', 2).catch(({ code }) => code)
    await until('the quota is exceeded', async () => (await create()) === -125)
  })
  return () => withZookeeper(url, (client) => client.delete(`${quota}/zookeeper_limits`))
}

/** The recorder of waiters: a folder has a node for each record, and for each waiter that holds the lock. */
export class ZookeeperRecorder {
  #folder
  #client
  /** @type {string[]} */
  #inside = []

  /** @param {string} url @param {{ keyPrefix?: string }} options @param {string} log */
  constructor(url, options, log) {
    this.prefix = options.keyPrefix ?? ''
    this.#folder = `/recorder-${folderOf(log)}`
    this.#client = openZookeeper(url).then(async (client) => {
      await client.create(this.#folder).catch(() => {})
      return client
    })
    // A test that does not use it sees no rejection.
    this.#client.catch(() => {})
  }

  /** Records that a waiter holds the lock. Resolves to the number of recorded holders. @param {string} label */
  async enter(label) {
    const client = await this.#client
    this.#inside.push(await client.create(`${this.#folder}/inside-`, '', 3))
    await this.record(label)
    return (await client.children(this.#folder)).filter((name) => name.startsWith('inside-')).length
  }

  async leave() {
    await (await this.#client).delete(String(this.#inside.shift()))
  }

  /** @param {string} text */
  async record(text) {
    await (await this.#client).create(`${this.#folder}/record-`, text, 2)
  }

  async records() {
    const client = await this.#client
    const names = (await entriesOf(client, this.#folder)).filter((name) => name.startsWith('record-'))
    return Promise.all(names.map((name) => client.data(`${this.#folder}/${name}`)))
  }

  /** @param {string} name */
  key(name) {
    return `/${folderOf(`${this.prefix}${name}`)}`
  }

  /** Lists the owners of the waiters of a name, first to last. @param {string} name */
  async positions(name) {
    const [, ...waiting] = await entriesOf(await this.#client, this.key(name))
    return waiting
  }

  /** @param {string} name */
  async isFree(name) {
    return (await entriesOf(await this.#client, this.key(name))).length === 0
  }

  /** Whether a name has neither a holder nor a waiter. @param {string} name */
  isUnused(name) {
    return this.isFree(name)
  }

  /** How long the entries of a dead process stay at least, with short sessions. */
  async remainingMs() {
    return 3500
  }

  /** Acquires a name as another tool would, if it is free. @param {string} name */
  async acquire(name) {
    const client = await this.#client
    await client.createContainer(this.key(name)).catch(() => {})
    const entry = await client.create(`${this.key(name)}/lock-`, '', 3)
    const [first] = await entriesOf(client, this.key(name))
    if (entry.endsWith(`/${first}`)) return true
    await client.delete(entry)
    return false
  }

  /** @param {string} name */
  async release(name) {
    const client = await this.#client
    const theirs = (await client.children(this.key(name))).filter((entry) => entry.startsWith('lock-'))
    for (const entry of theirs) await client.delete(`${this.key(name)}/${entry}`)
  }

  async close() {
    await (await this.#client).close()
  }
}
