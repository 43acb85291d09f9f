// Redis for the suites of durability, promotion and security.
import { locateRedis, startRedis } from '../../scripts/servers.mjs'
import { startProxy } from '../proxy.mjs'
import { openRedis } from '../redis-client.mjs'
import { until } from '../tools.mjs'

/** Calls a function with a client of a server, as its administrator. @param {{ port: number, password?: string }} server @param {(redis: any) => any} body */
async function withRedis({ port, password }, body) {
  const redis = openRedis({ host: '127.0.0.1', port, password })
  try {
    return await body(redis)
  } finally {
    redis.disconnect()
  }
}

/**
 * Starts a master and its replica behind one address. A grant waits for the replica, unless `isSynchronous` is false. See
 * `postgres-replication.mjs`.
 */
async function startPair({ isSynchronous = true } = {}) {
  const [primary, replica] = await Promise.all([startRedis(), startRedis()])
  const proxy = await startProxy(primary.port)
  const follow = (server, port) => withRedis(server, (redis) => redis.replicaof('127.0.0.1', port))
  const received = () =>
    withRedis(primary, (redis) => until('the replica', async () => (await redis.wait(1, 100)) === 1))
  const attach = async () => {
    await follow(replica, primary.port)
    await received()
  }
  await attach()
  let isAttached = true
  return {
    primary,
    replica,
    options: isSynchronous ? { minReplicas: 1 } : {},
    url: () => `redis://127.0.0.1:${proxy.port}`,
    async detach() {
      isAttached = false
      await follow(replica, 1)
    },
    attach,
    async lose() {
      if (isAttached) await received()
      await primary.kill()
      proxy.target = replica.port
    },
    // The open connections still lead to the old master, which is a replica of nothing.
    async refuseWrites() {
      await received()
      await follow(primary, 1)
      proxy.target = replica.port
    },
    promote: () => withRedis(replica, (redis) => redis.replicaof('NO', 'ONE')),
    stop: () => Promise.all([proxy.close(), primary.stop(), replica.stop()]),
  }
}

/** The password of the administrator. */
const ADMIN = 'admin'
const acl = (server, ...rules) => withRedis(server, (redis) => redis.call('ACL', 'SETUSER', ...rules))

/** What the suites need of a store. */
export const redis = {
  kind: 'redis',
  locate: locateRedis,
  logs: [],
  replicaReads: true,
  startPair,
  /** Whether a server has a lock. */
  has: (server, name) => withRedis(server, async (redis) => (await redis.exists(`lock:${name}`)) === 1),
  /** Starts servers with TLS on their second port, and one without. The password of the administrator is on the last one only. */
  async startSecure({ own: { cert, key }, ca, user, password }) {
    const start = (mutual) =>
      startRedis({
        tls: /** @type {any} */ ({
          settings: (port) => [
            ['tls-port', port],
            ['tls-cert-file', cert],
            ['tls-key-file', key],
            ['tls-ca-cert-file', ca],
            ['tls-auth-clients', mutual ? 'yes' : 'no'],
          ],
        }),
      })
    const [open, mutual, users] = await Promise.all([
      start(false),
      start(true),
      startRedis({ args: ['--requirepass', ADMIN] }),
    ])
    Object.assign(users, { password: ADMIN })
    for (const server of [open, users]) await acl(server, user, 'on', `>${password}`, '~*', '&*', '+@all')
    for (const server of [open, mutual]) Object.assign(server, { port: server.tlsPort })
    return { open, mutual, users }
  },
  /** A URL of a server. */
  url: ({ port, host = '127.0.0.1', login = '', tls = false }) =>
    `redis${tls ? 's' : ''}://${login && `${login}@`}${host}:${port}`,
  revoke: (server) => acl(server, 'app', 'resetkeys'),
  grant: (server) => acl(server, 'app', '~*'),
  async setPassword(server, password) {
    await acl(server, 'app', 'resetpass', `>${password}`)
    await withRedis(server, (redis) => redis.call('CLIENT', 'KILL', 'USER', 'app'))
  },
  errors: {
    readOnly: /READONLY/,
    tlsOption: 'target must begin with rediss://',
    noTls: /TLS/,
    onlyTls: /begin the URL with rediss/,
    wrongPassword: /WRONGPASS|password/,
    noLogin: /NOAUTH|login|password/,
  },
}
