// etcd for the suites of faults, failover and security. The members of a cluster reach each other through proxies.
import { once } from 'node:events'
import net from 'node:net'
import { etcdctl, locateEtcd, startEtcd, startMembers } from '../../scripts/etcd.mjs'
import { freePort } from '../../scripts/servers.mjs'
import { EtcdClient } from '../etcd-client.mjs'
import { owns } from '../proxy.mjs'
import { random } from '../stores.mjs'
import { sleep } from '../tools.mjs'

class Cluster {
  /** @type {Awaited<ReturnType<typeof startMembers>>} */
  members = []
  /** @type {any[]} Each is `{ one, other }`: what is cut off: a member from all, or from one other. */
  #faults = []
  /** @type {Set<any>} Each is `{ to, client, server }`. */
  #connections = new Set()
  /** @type {net.Server[]} */
  #proxies = []

  async start() {
    this.members = await startMembers(await Promise.all([0, 1, 2].map((to) => this.#listen(to))))
    return this
  }

  async #listen(to) {
    const [peer, advertised] = [await freePort(), await freePort()]
    const proxy = net.createServer((client) => this.#accept({ to, client }, peer))
    this.#proxies.push(proxy.listen(advertised, '127.0.0.1'))
    await once(proxy, 'listening')
    return { peer, advertised }
  }

  async #accept(connection, port) {
    const { client } = connection
    client.on('error', () => {}).on('close', () => this.#connections.delete(connection))
    this.#connections.add(connection)
    // Nothing passes before the owner of the connection is known.
    for (const fault of this.#faults) if (await this.#apply(fault, connection)) return
    const server = (connection.server = net.connect(port, '127.0.0.1'))
    server.on('error', () => {}).on('close', () => client.destroy())
    client.on('close', () => server.destroy())
    client.pipe(server).pipe(client)
  }

  /** Breaks a connection of a member that is cut off, or silences one between two members. Returns whether it did. */
  async #apply({ one, other }, connection) {
    const { to, client, server } = connection
    const from = other === undefined ? one : { [one]: other, [other]: one }[to]
    const isFrom = () => from !== undefined && owns(this.members[from].pid, client).catch(() => true)
    if (!(other === undefined && to === one) && !(await isFrom())) return false
    connection.isSilent = other !== undefined
    if (connection.isSilent) for (const socket of [client, server]) socket?.unpipe().pause()
    else client.destroy()
    return true
  }

  async #begin(fault) {
    this.#faults.push(fault)
    await Promise.all([...this.#connections].map((connection) => this.#apply(fault, connection)))
  }

  /** The URL of all members, or of some. */
  url = (...indexes) =>
    `etcd://${(indexes.length > 0 ? indexes : [0, 1, 2]).map((index) => `127.0.0.1:${this.members[index].port}`)}`

  /** The index of the leader. Waits until there is one. */
  async leader() {
    for (;;) {
      for (const [index, member] of this.members.entries()) {
        const status = ['--command-timeout=1s', 'endpoint', 'status', '-w', 'json']
        const [{ Status } = {}] = JSON.parse(await etcdctl(member, ...status).catch(() => '[]'))
        if (Status?.leader !== undefined && Status.leader === Status.header.member_id) return index
      }
      await sleep(100)
    }
  }

  /** Cuts a member off from the others: connections break, and new ones are closed. Its clients still reach it. */
  cutOff = (index) => this.#begin({ one: index })

  /** Nothing passes between two members, and no connection breaks. */
  silence = (one, other) => this.#begin({ one, other })

  heal() {
    for (const { client, isSilent } of this.#connections) if (isSilent) client.destroy()
    this.#faults = []
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
  startCluster: () => new Cluster().start(),
  /** The wall clock of a member, in milliseconds since 1970: the date of an HTTP response. */
  clock: async ({ port }) => Date.parse(String((await fetch(`http://127.0.0.1:${port}/version`)).headers.get('date'))),
  /** Starts one server, with TLS, or with space for little. */
  start: (/** @type {any} */ { tls, isSmall } = {}) =>
    startEtcd({ tls, args: isSmall ? ['--quota-backend-bytes', String(16 << 20)] : [] }),
  /** A URL of a server. */
  url: ({ port, host = '127.0.0.1', login = '', tls = false }) =>
    `etcd${tls ? 's' : ''}://${login && `${login}@`}${host}:${port}`,
  loginLastsMs: 2000,
  /** Starts a server with a user that has the permissions for one prefix. */
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
  /** Adds entries of another client to a name. Resolves to a function that removes them. */
  addEntries: ({ url }, key, count, size) => new EtcdClient(url).addEntries(key, count, size),
  compact: ({ url }) => new EtcdClient(url).compact(),
  /** Writes until there is no space. Resolves to a function that makes room. */
  async fill(server) {
    const client = new EtcdClient(server.url)
    const fill = () => client.addEntries(`full/${random()}`, 1, 1 << 20).catch(() => {})
    while (!(await etcdctl(server, 'alarm', 'list')).includes('NOSPACE')) await fill()
    return async () => {
      await etcdctl(server, 'del', '--prefix', 'full/')
      await client.compact()
      await etcdctl(server, 'defrag')
      await etcdctl(server, 'alarm', 'disarm')
    }
  },
  errors: {
    full: /space exceeded.*etcdctl alarm disarm/,
    onlyTls: /etcds:\/\//,
    wrongPassword: /user name and the password/,
    noLogin: /login/,
    otherPrefix: /permission/,
  },
}
