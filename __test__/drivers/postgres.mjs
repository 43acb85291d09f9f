// PostgreSQL for the suites sqlFaults, durability, promotion and security.
import { locatePostgres, startPostgres } from '../../scripts/postgres.mjs'
import { LockService } from '../../index.js'
import { connected, query, startPair } from '../postgres-replication.mjs'
import { random } from '../stores.mjs'

/** Adds a role with limits and settings of its own. Resolves to its URL. */
async function userWith({ url }, { limits = '', settings = {} }) {
  const role = `r${random()}`
  await query(
    { url },
    `CREATE ROLE ${role} LOGIN ${limits}`,
    `GRANT USAGE ON SCHEMA holdfast TO ${role}`,
    `GRANT ALL ON ${TABLES} TO ${role}`,
    ...Object.entries(settings).map(([name, value]) => `ALTER ROLE ${role} SET ${name} = '${value}'`),
  )
  return url.replace('holdfast@', `${role}@`)
}

const HOLDFAST = "FROM pg_stat_activity WHERE application_name = 'holdfast'"
/** The rules for logins: the tests' own user without TLS, `app` with a password, `tls` with TLS, `cert` with a certificate. */
const HBA = [
  'local all holdfast trust',
  'host all holdfast 127.0.0.1/32 trust',
  'host all app 127.0.0.1/32 scram-sha-256',
  'hostssl all tls 127.0.0.1/32 scram-sha-256',
  'hostssl all cert 127.0.0.1/32 cert',
]
const TABLES = 'holdfast.locks, holdfast.locks_waiters'

/** Starts a server with users that have this password, and the tables. */
async function startWithUsers({ password, ...how }) {
  const server = await startPostgres({ hba: HBA, hasSocket: true, ...how })
  await (await LockService.connect(`${server.url}?sslmode=disable`)).close()
  for (const role of ['app', 'tls', 'cert']) {
    const rights = `GRANT USAGE, CREATE ON SCHEMA holdfast TO ${role}; GRANT ALL ON ${TABLES} TO ${role}`
    await query(server, `CREATE ROLE ${role} LOGIN PASSWORD '${password}'`, rights)
    await query(server, `GRANT CREATE ON DATABASE postgres TO ${role}`)
  }
  return server
}

/** Settings of a role for its sessions. */
const ofRole = (settings) => ({
  what: JSON.stringify(settings),
  begin: async (server) => ({ url: await userWith(server, { settings }), end: () => {} }),
})

/** What the suites need of a store. */
export const postgres = {
  kind: 'postgres',
  locate: locatePostgres,
  start: (how) => startPostgres({ settings: { max_connections: 40 }, ...how }),
  connected,
  query,
  startPair,
  cancels: true,
  has: async (server, name) =>
    (await query(server, `SELECT name FROM holdfast.locks WHERE name = '${name}'`)).length > 0,
  userWith,
  open: async (url) => {
    const { Client } = /** @type {any} */ (await import('pg')).default
    const client = new Client({ connectionString: url })
    client.on('error', () => {})
    await client.connect()
    return client
  },
  /** What keeps a grant when the server is killed, and the setting with which it may be lost. */
  logs: [
    {
      title: 'the log',
      unsafe: {
        set: 'ALTER DATABASE postgres SET synchronous_commit = off',
        reset: 'ALTER DATABASE postgres RESET synchronous_commit',
        text: 'synchronous_commit = off',
      },
    },
  ],
  /** Starts a server with TLS, and one without. The login of `open` needs TLS, that of `mutual` a certificate. */
  async startSecure({ own, ca, login, password }) {
    const [open, users] = await Promise.all([
      startWithUsers({ password, tls: { ...own, ca } }),
      startWithUsers({ password }),
    ])
    Object.assign(open, { login: login.replace('app', 'tls') })
    return { open, mutual: { port: open.port, login: 'cert', stop: () => {} }, users }
  },
  /** A URL of a server. `mode` is a value of `sslmode`. */
  url: ({ port, host = '127.0.0.1', login = '', tls = false, mode = tls ? 'require' : 'disable' }) =>
    `postgres://${login && `${login}@`}${host}:${port}/postgres${mode && `?sslmode=${mode}`}`,
  modes: { named: ['', 'prefer', 'require', 'verify-full'], any: 'verify-ca' },
  /** The URLs of the Unix socket of a server. */
  socketUrls: ({ socket, port }) => [
    `postgres://holdfast@/postgres?host=${encodeURIComponent(socket)}&port=${port}`,
    `postgres://holdfast@${encodeURIComponent(socket)}:${port}/postgres`,
  ],
  /** Whether each connection of holdfast is one of the Unix socket. */
  areLocal: async (server) =>
    (await query(server, `SELECT client_addr ${HOLDFAST}`)).map((row) => row.client_addr === null),
  /** Whether all connections of holdfast have TLS. */
  areSecure: async (server) =>
    (
      await query(
        server,
        `SELECT bool_and(ssl) AS ssl FROM pg_stat_ssl JOIN (SELECT pid ${HOLDFAST}) AS own USING (pid)`,
      )
    )[0].ssl,
  revoke: (server) => query(server, `REVOKE ALL ON ${TABLES} FROM app`),
  grant: (server) => query(server, `GRANT ALL ON ${TABLES} TO app`),
  setPassword: (server, password) =>
    query(
      server,
      `ALTER ROLE app PASSWORD '${password}'`,
      `SELECT pg_terminate_backend(pid) ${HOLDFAST} AND usename = 'app'`,
    ),
  lockTables: 'BEGIN; LOCK TABLE holdfast.locks, holdfast.locks_waiters',
  unlockTables: 'ROLLBACK',
  lockRow: (name) => `BEGIN; SELECT 1 FROM holdfast.locks WHERE name = '${name}' FOR UPDATE`,
  dropTables: 'DROP TABLE holdfast.dropped, holdfast.dropped_waiters',
  waitingStatements: `SELECT pid ${HOLDFAST} AND wait_event_type = 'Lock'`,
  terminate: (run) => run(`SELECT pg_terminate_backend(pid) ${HOLDFAST}`),
  lockRows: `BEGIN; LOCK TABLE ${TABLES}`,
  /** How many statements over TLS wait for a lock. */
  rowWaits: async (run) =>
    (
      await run(
        `SELECT pid FROM pg_stat_ssl JOIN (SELECT pid ${HOLDFAST} AND wait_event_type = 'Lock') AS waiting USING (pid) WHERE ssl`,
      )
    ).length,
  fullServers: [{ title: 'no free connection', limits: '', error: /\[53300\]/ }],
  oneConnection: 'CONNECTION LIMIT 1',
  shortStatements: { settings: { statement_timeout: '200ms' } },
  settings: [
    { idle_in_transaction_session_timeout: '1ms' },
    { lock_timeout: '1ms' },
    { default_transaction_isolation: 'serializable' },
    { default_transaction_isolation: 'repeatable read', default_transaction_deferrable: 'on' },
  ].map(ofRole),
  errors: {
    otherName: /for another host name.*hostaddr.*sslmode=verify-ca/,
    noTls: /the server has no TLS: add sslmode=disable/,
    onlyTls: /the server may expect TLS: add sslmode=require/,
    wrongPassword: /check the user name and the password.*percent-encoded/,
    tlsOption: 'tls must be absent, or sslmode=disable removed from the URL',
    readOnly: /does not allow writes \(it is a standby.*must lead to the primary/,
    statementTimeout: /\[(57014|55P03)\]/,
  },
}
