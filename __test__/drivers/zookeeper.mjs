// ZooKeeper for the suites of faults, failover and security. Three servers reach each other through proxies.
import { open } from 'node:fs/promises'
import { ask, locateZookeeper, modeOf, startZookeeper, startZookeepers } from '../../scripts/zookeeper.mjs'
import { startProxy } from '../proxy.mjs'
import { sleep } from '../tools.mjs'
import { addEntries, fillQuota, folderOf, withZookeeper } from '../zookeeper-client.mjs'

/** Resolves to the ports that are listened at. They come first in a table, and the rest, with all closed connections, takes long to read. */
async function listeners(name) {
  const table = await open(`/proc/net/${name}`).catch(() => undefined)
  let text = ''
  try {
    const isOther = /^ *\d+: \w+:\w+ \w+:\w+ (?!0A)\w\w /m
    for (let part; table && !isOther.test(text); text += part) {
      const { bytesRead, buffer } = await table.read(Buffer.alloc(4096))
      if (bytesRead === 0) break
      part = buffer.toString('latin1', 0, bytesRead)
    }
  } finally {
    await table?.close()
  }
  return [...text.matchAll(/^ *\d+: \w+:(\w{4}) \w+:0000 0A/gm)].map(([, port]) => parseInt(port, 16))
}

class Cluster {
  /** @type {Set<number>} The indexes of the servers that are cut off. */
  #cut = new Set()
  /** @type {Awaited<ReturnType<typeof startZookeepers>>['members']} */
  members = []
  /** @type {{ from: number, to: number, port: number, proxy: Awaited<ReturnType<typeof startProxy>>, isUp: boolean, isBusy: boolean }[]} */
  links = []
  /** @type {NodeJS.Timeout | undefined} */
  #timer

  /** @param {Record<string, string | number>} settings */
  async start(settings) {
    this.#timer = setInterval(() => this.#mirror(), 50).unref()
    const { members } = await startZookeepers({
      settings,
      address: async (from, to, port) => {
        const proxy = await startProxy(port)
        this.links.push({ from: from - 1, to: to - 1, port, proxy, isUp: true, isBusy: false })
        return proxy.port
      },
    })
    this.members = members
    return this
  }

  /** Makes each proxy listen while its server does, and is not cut off: a follower retries a connection that is refused. */
  async #mirror() {
    const tables = await Promise.all(['tcp', 'tcp6'].map(listeners))
    const listening = new Set(tables.flat())
    for (const link of this.links) {
      const isUp = listening.has(link.port) && !this.#cut.has(link.from) && !this.#cut.has(link.to)
      if (link.isBusy || link.proxy.isSilent || isUp === link.isUp) continue
      Object.assign(link, { isUp, isBusy: true })
      const changed = isUp ? link.proxy.up() : link.proxy.down()
      changed.catch(() => {}).finally(() => (link.isBusy = false))
    }
  }

  /** The URL of all servers, or of some. @param {number[]} indexes */
  url(...indexes) {
    const members = indexes.length > 0 ? indexes.map((index) => this.members[index]) : this.members
    return `zookeeper://${members.map(({ port }) => `127.0.0.1:${port}`)}`
  }

  /** The index of the leader. Waits until there is one, and the servers that are asked follow it. */
  async leader(among = [0, 1, 2]) {
    for (;;) {
      const modes = await Promise.all(among.map((index) => modeOf(this.members[index].port)))
      const leader = modes.indexOf('leader')
      if (leader >= 0 && modes.filter((mode) => mode === 'follower').length > 0) return among[leader]
      await sleep(100)
    }
  }

  /** The links of a server to the others, and theirs to it. @param {number} index */
  linksOf = (index) => this.links.filter(({ from, to }) => from === index || to === index)

  /** Cuts a server off from the others: connections break, and new ones are refused. Its clients still reach it. @param {number} index */
  async cutOff(index) {
    this.#cut.add(index)
    while (this.linksOf(index).some(({ isUp, isBusy }) => isUp || isBusy)) await sleep(10)
  }

  #between = (one, other) => this.linksOf(one).filter(({ from, to }) => from === other || to === other)

  /** Nothing passes between two servers, not even the end of a connection. @param {number} one @param {number} other */
  silence = (one, other) => this.#between(one, other).forEach(({ proxy }) => proxy.silence())

  /** Delays what two servers send each other. @param {number} one @param {number} other @param {number} delayMs */
  delay = (one, other, delayMs) => this.#between(one, other).forEach(({ proxy }) => Object.assign(proxy, { delayMs }))

  heal() {
    for (const { proxy } of this.links) {
      if (proxy.delayMs > 0) proxy.cut()
      proxy.delayMs = 0
      proxy.resume()
    }
    this.#cut.clear()
  }

  async stop() {
    clearInterval(this.#timer)
    await Promise.all(this.members.map((member) => member.stop()))
    await Promise.all(this.links.map(({ proxy }) => proxy.close()))
  }
}

/** The folder in the URLs. */
const FOLDER = '/locks'
/** The permission to change permissions, and all permissions. */
const [ADMIN, ALL] = [16, 31]

/** Changes what the login of a server may do in the folder of its URL. */
const setRights = ({ port, digest }, perms) =>
  withZookeeper(`zookeeper://127.0.0.1:${port}`, async (client) => {
    await client.addAuth(digest)
    await client.setAcl(FOLDER, [{ perms, scheme: 'auth', id: '' }])
  })

/** What the suites need of a store. */
export const zookeeper = {
  kind: 'zookeeper',
  locate: locateZookeeper,
  /** The wall clock of a server, in milliseconds since 1970: the time of a new session. @param {{ url: string, port: number }} member */
  clock: ({ url, port }) =>
    withZookeeper(url, async () => Number(/lop=SESS,est=(\d+)/.exec(await ask(port, 'cons'))?.[1])),
  /** Starts three servers, which detect a broken link within 4 s, or within 10 s, the default. */
  startCluster: ({ detectsLate = false } = {}) => new Cluster().start({ syncLimit: detectsLate ? 5 : 2, initLimit: 2 }),
  /** Leases last for 10 s without a renewal, so that they outlast an election on a busy machine. */
  service: { sessionTimeoutMs: 20_000, connectMs: 20_000 },
  /** A lock lasts for at least this long without a server: a lease of half a session, which is renewed after a third of it. */
  lastsMs: 6500,
  /** Starts one server with quotas, and with TLS. */
  start: (/** @type {any} */ { tls } = {}) =>
    startZookeeper({ tls, options: ['-Dzookeeper.enforceQuota=true', '-Xmx800m'] }),
  /** A URL of a server. Its folder belongs to the first login. */
  url: ({ port, tlsPort = 0, host = '127.0.0.1', login = '', tls = false }) =>
    `zookeeper${tls ? 's' : ''}://${login && `${login}@`}${host}:${tlsPort || port}${FOLDER}`,
  /** Starts a server. A service gives the permissions for its folder to its login. */
  startWithUsers: async ({ user, password }) =>
    Object.assign(await startZookeeper(), { digest: `${user}:${password}` }),
  revoke: (server) => setRights(server, ADMIN),
  grant: (server) => setRights(server, ALL),
  revokedLocksLast: true,
  /** Sessions that end soon after their process is suspended. */
  shortSession: { sessionTimeoutMs: 4000 },
  /** Adds entries of another client to a name. Resolves to a function that removes them. */
  addEntries: ({ url }, key, count, size) => addEntries(url, `${FOLDER}/${folderOf(key)}`, count, size),
  /** Exceeds a quota. Resolves to a function that removes it. */
  fill: ({ url }) => fillQuota(url, FOLDER, 9),
  errors: {
    tooLong: /the list of the entries of .+ has more than 16 MiB/,
    full: /QuotaExceeded \(-125\): raise the quota/,
    noTls: /secureClientPort/,
    onlyTls: /zookeepers:\/\//,
    wrongPassword: /NoAuth \(-102\): give the login of the URL the permissions/,
    noLogin: /NoAuth \(-102\): give the login of the URL the permissions/,
  },
}
