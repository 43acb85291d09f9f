// MariaDB for the suites sqlFaults, durability, promotion and security.
import { locateMariadb, startMariadb } from '../../scripts/mysql.mjs'
import { connected, logged, query, startPair } from '../mysql-replication.mjs'
import { random } from '../stores.mjs'

/** Adds a user with limits. Resolves to its URL. */
async function userWith({ url }, { limits }) {
  const user = `u${random()}`
  const rights = `GRANT SELECT, INSERT, UPDATE, DELETE ON holdfast.* TO ${user}`
  await query({ url }, `CREATE USER ${user} WITH ${limits}`, rights)
  return url.replace('holdfast@', `${user}@`)
}

const OTHERS = "FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND user IN ('holdfast', 'app')"

/** Ends the connections of holdfast. */
async function terminate(run) {
  // It may have ended.
  for (const { id } of await run(`SELECT id ${OTHERS}`)) await run(`KILL ${id}`).catch(() => {})
}
const endConnections = (server) => connected(server.url, terminate)

/** Starts a server with users that have this password: `app`, `tls` that needs TLS, and `cert` that needs a certificate. */
async function startWithUsers({ password, ...how }) {
  const server = await startMariadb(how)
  for (const [user, needs] of [
    ['app', 'NONE'],
    ['tls', 'SSL'],
    ['cert', 'X509'],
  ])
    await query(
      server,
      `CREATE USER ${user} IDENTIFIED BY '${password}' REQUIRE ${needs}`,
      `GRANT ALL ON holdfast.* TO ${user}`,
    )
  return server
}

/** A setting of the server for new sessions. */
const ofServer = ([name, value]) => ({
  what: `${name} = ${value}`,
  async begin(server) {
    const [{ before }] = await query(server, `SELECT CAST(@@GLOBAL.${name} AS CHAR) AS \`before\``)
    await query(server, `SET GLOBAL ${name} = ${value}`)
    const end = () => query(server, `SET GLOBAL ${name} = ${/^\d+$/.test(before) ? before : `'${before}'`}`)
    return { url: server.url, end }
  },
})
const unsafe = (name, value, safe) => ({
  set: `SET GLOBAL ${name} = ${value}`,
  reset: `SET GLOBAL ${name} = ${safe}`,
  text: `${name} = ${value}`,
})

/** What the suites need of a store. */
export const mysql = {
  kind: 'mysql',
  locate: locateMariadb,
  start: startMariadb,
  connected,
  query,
  startPair,
  has: async (server, name) =>
    (await query(server, `SELECT name FROM holdfast.locks WHERE name = '${name}'`)).length > 0,
  userWith,
  open: async (url) => {
    const { createConnection } = /** @type {any} */ (await import('mysql2/promise')).default
    return createConnection(url)
  },
  logs: [
    { title: 'the log', unsafe: unsafe('innodb_flush_log_at_trx_commit', 2, 1) },
    { title: 'a binary log', settings: logged(1), unsafe: unsafe('sync_binlog', 0, 1) },
  ],
  /** Starts a server with TLS, and one without. The login of `open` needs TLS, that of `mutual` a certificate. */
  async startSecure({ own: { cert, key }, ca, login, password }) {
    const [open, users] = await Promise.all([
      startWithUsers({ password, tls: { cert, key, ca } }),
      startWithUsers({ password }),
    ])
    Object.assign(open, { login: login.replace('app', 'tls') })
    return { open, mutual: { port: open.port, login: login.replace('app', 'cert'), stop: () => {} }, users }
  },
  /** A URL of a server. `mode` is a value of `ssl-mode`. */
  url: ({ port, host = '127.0.0.1', login = '', tls = false, mode = tls ? 'REQUIRED' : 'DISABLED' }) =>
    `mysql://${login && `${login}@`}${host}:${port}/holdfast${mode && `?ssl-mode=${mode}`}`,
  modes: { named: ['', 'PREFERRED', 'REQUIRED', 'VERIFY_IDENTITY'], any: 'VERIFY_CA' },
  /** The URLs of the Unix socket of a server. */
  socketUrls: ({ socket }) => [`mysql://holdfast@localhost/holdfast?socket=${encodeURIComponent(socket)}`],
  /** Whether each connection of holdfast is one of the Unix socket: one of TCP has an address with a port. */
  areLocal: async (server) => (await query(server, `SELECT host ${OTHERS}`)).map(({ host }) => host === 'localhost'),
  // Open connections keep the permissions for a database that they use.
  revoke: (server) => query(server, 'REVOKE ALL ON holdfast.* FROM app').then(() => endConnections(server)),
  grant: (server) => query(server, 'GRANT ALL ON holdfast.* TO app').then(() => endConnections(server)),
  lockTables: 'LOCK TABLES locks WRITE, locks_waiters WRITE',
  unlockTables: 'UNLOCK TABLES',
  lockRow: (name) => `BEGIN; SELECT 1 FROM locks WHERE name = '${name}' FOR UPDATE`,
  dropTables: 'DROP TABLE dropped, dropped_waiters',
  waitingStatements:
    "SELECT id FROM information_schema.processlist WHERE command = 'Query' AND state LIKE 'Waiting for table%'",
  terminate,
  // A statement that waits for a table ends with its connection; one that waits for a row does not.
  lockRows: "BEGIN; SELECT 1 FROM locks WHERE name IN ('test/n', 'test/m') FOR UPDATE",
  rowWaits: async (run) => Number((await run("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'"))[0].Value),
  fullServers: [
    { title: 'no free connection of the user', limits: 'MAX_USER_CONNECTIONS 2', error: /\[1226\]/ },
    {
      title: 'no free connection of the server',
      limits: 'MAX_USER_CONNECTIONS 0',
      // A user with all rights may open one more.
      begin: 'SET GLOBAL max_connections = 20',
      end: 'SET GLOBAL max_connections = 300',
      error: /Too many connections \[1040\]/,
    },
  ],
  oneConnection: 'MAX_USER_CONNECTIONS 1',
  shortStatements: { limits: 'MAX_STATEMENT_TIME 0.2' },
  settings: Object.entries({
    wait_timeout: 1,
    idle_transaction_timeout: 1,
    innodb_lock_wait_timeout: 1,
    autocommit: 0,
    sql_mode: "'ANSI,NO_BACKSLASH_ESCAPES,TRADITIONAL'",
    tx_isolation: "'SERIALIZABLE'",
    time_zone: "'+05:30'",
    // A row that is not in an answer would count as free.
    sql_select_limit: 1,
    completion_type: "'RELEASE'",
  }).map(ofServer),
  /** A replica answers reads; a service that only reads leaves a primary that has become one. */
  replicaReads: true,
  readsFollow: true,
  errors: {
    otherName: /for another host name: .*ssl-mode=VERIFY_CA/,
    noTls: /does not support TLS \(add ssl-mode=DISABLED/,
    onlyTls: /\[1045\] .*a user that requires TLS needs ssl-mode=REQUIRED/i,
    wrongPassword: /\[1045\] .*check the user name and the password/,
    permission: /denied/,
    tlsOption: 'tls must be absent, or ssl-mode=DISABLED removed from the URL',
    readOnly: /--read-only .*\[1290\] .*the URL must lead to the primary/,
    statementTimeout: /\[(1969|1205)\]/,
  },
}
