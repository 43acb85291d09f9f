// A cluster of three etcd members for the suites of faults, failover and security: each reaches the others through proxies.
import { execFile } from 'node:child_process'
import { readdir, readFile, readlink } from 'node:fs/promises'
import net from 'node:net'
import { promisify } from 'node:util'
import { etcdctl, locateEtcd, locateEtcdctl, startEtcd, startMembers } from '../../scripts/etcd.mjs'
import { freePort } from '../../scripts/servers.mjs'
import { sleep } from '../tools.mjs'

const run = promisify(execFile)

/** Returns whether a process has the other end of a connection. Only Linux shows that. */
async function owns(pid, { remotePort = 0, localPort = 0 }) {
  const hex = (/** @type {number} */ port) => `:${port.toString(16).toUpperCase().padStart(4, '0')}`
  const lines = (await readFile('/proc/net/tcp', 'utf8')).split('\n').map((line) => line.trim().split(/\s+/))
  const isIt = (/** @type {string[]} */ [, local, remote]) =>
    local?.endsWith(hex(remotePort)) && remote?.endsWith(hex(localPort))
  // A connection that has ended has the inode 0.
  const inodes = lines.filter((fields) => isIt(fields) && fields[9] !== '0').map((fields) => `socket:[${fields[9]}]`)
  const links = (await readdir(`/proc/${pid}/fd`)).map((fd) => readlink(`/proc/${pid}/fd/${fd}`).catch(() => ''))
  return (await Promise.all(links)).some((link) => inodes.includes(link))
}

class Cluster {
  /** @type {Awaited<ReturnType<typeof startMembers>>} */
  members = []
  /** @type {Set<number>} The indexes of the members that are cut off. */
  #cut = new Set()
  /** @type {Set<{ to: number, client: net.Socket, server: net.Socket }>} */
  #connections = new Set()
  /** @type {net.Server[]} */
  #proxies = []

  async start(args) {
    const peers = await Promise.all(
      [0, 1, 2].map(async (to) => {
        const [peer, advertised] = [await freePort(), await freePort()]
        const proxy = net.createServer((client) => this.#accept(client, to, peer))
        await new Promise((resolve) => proxy.listen(advertised, '127.0.0.1', () => resolve(undefined)))
        this.#proxies.push(proxy)
        return { peer, advertised }
      }),
    )
    this.members = await startMembers(peers, args)
    return this
  }

  async #accept(client, to, port) {
    client.on('error', () => {})
    // Nothing passes before the owner of the connection is known.
    if (await this.#isCut(to, client)) return client.destroy()
    const server = net.connect(port, '127.0.0.1')
    this.#connections.add({ to, client, server })
    for (const [from, into] of [
      [client, server],
      [server, client],
    ]) {
      from.on('error', () => {}).on('close', () => into.destroy())
      from.pipe(into)
    }
  }

  async #isCut(to, client) {
    for (const index of this.#cut) {
      if (to === index || (await owns(this.members[index].pid, client).catch(() => true))) return true
    }
    return false
  }

  /** The URL of all members, or of some. */
  url(...indexes) {
    const members = indexes.length > 0 ? indexes.map((index) => this.members[index]) : this.members
    return `etcd://${members.map(({ port }) => `127.0.0.1:${port}`).join()}`
  }

  /** The index of the leader. Waits until there is one. `among`: the members that are asked. */
  async leader(among = [0, 1, 2]) {
    for (;;) {
      for (const index of among) {
        const { port } = this.members[index]
        const status = await etcdctl({ port }, '--command-timeout=1s', 'endpoint', 'status', '-w', 'json').catch(
          () => '[]',
        )
        const [{ Status } = {}] = JSON.parse(status)
        if (Status?.leader !== undefined && Status.leader === Status.header.member_id) return index
      }
      await sleep(100)
    }
  }

  /** Cuts a member off from the others. Its clients still reach it. */
  async cutOff(index) {
    this.#cut.add(index)
    for (const connection of this.#connections) {
      const isOpen = !connection.client.destroyed
      if (isOpen && !(await this.#isCut(connection.to, connection.client))) continue
      connection.client.destroy()
      this.#connections.delete(connection)
    }
  }

  heal() {
    this.#cut.clear()
  }

  async stop() {
    await Promise.all(this.members.map((member) => member.stop()))
    for (const proxy of this.#proxies) proxy.close()
  }
}

/** What the suites need of a store. */
export const etcd = {
  kind: 'etcd',
  locate: locateEtcd,
  /** Starts three members. */
  startCluster: (args = []) => new Cluster().start(args),
  /** Starts one server, with TLS or more arguments. */
  start: startEtcd,
  /** A URL of a server. */
  url: ({ port, host = '127.0.0.1', login = '', tls = false }) =>
    `etcd${tls ? 's' : ''}://${login && `${login}@`}${host}:${port}`,
  /** Starts a server with a user that has the rights for one prefix. Tokens expire after 2 s without use. */
  async startWithUsers({ user, password, prefix }) {
    const server = await startEtcd({ args: ['--auth-token-ttl', '2', '--bcrypt-cost', '4'] })
    for (const command of [
      ['user', 'add', 'root:root'],
      ['user', 'grant-role', 'root', 'root'],
      ['role', 'add', 'locks'],
      ['role', 'grant-permission', 'locks', '--prefix=true', 'readwrite', prefix],
      ['user', 'add', `${user}:${password}`],
      ['user', 'grant-role', user, 'locks'],
      ['auth', 'enable'],
    ])
      await etcdctl(server, ...command)
    return server
  },
  revoke: (server) => etcdctl(server, '--user=root:root', 'user', 'revoke-role', 'app', 'locks'),
  grant: (server) => etcdctl(server, '--user=root:root', 'user', 'grant-role', 'app', 'locks'),
  errors: {
    noTls: /TLS/,
    onlyTls: /connect|connection|broke/,
    wrongPassword: /user name and the password/,
    noLogin: /login/,
    otherPrefix: /permission/,
  },
}
