// TLS, sockets and logins on MariaDB: what is verified, and the warning of a setting with which a crash loses grants. MariaDB has no users
// with caching_sha2_password: `mysql-server.spec.mjs` tests them on MySQL's own server.
import assert from 'node:assert/strict'
import { copyFileSync, mkdirSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { certify, makeAuthority } from '../scripts/certificates.mjs'
import { locateMariadb, startMariadb } from '../scripts/mysql.mjs'
import { start } from './cli.mjs'
import { withMysql } from './mysql-client.mjs'
import { startProxy } from './proxy.mjs'
import { exchangeAuthority } from './sql-faults.mjs'
import { canStartServer, connectWith, skip } from './stores.mjs'
import { INDEX, later, output, rejects, until } from './tools.mjs'

const PASSWORD = 'p@ss:w/rd'
const ENCODED = encodeURIComponent(PASSWORD)

describe('mysql: TLS and logins', { concurrency: 1 }, () => {
  const dir = mkdtempSync(join(tmpdir(), 'holdfast-mysql-'))
  /** @type {Awaited<ReturnType<typeof startMariadb>>} */
  let server
  /** @type {Awaited<ReturnType<typeof startMariadb>>} */
  let plain
  /** @type {string | undefined} */
  let unable
  const file = (name) => join(dir, name)
  /** The URL of the server, which has a certificate for `localhost`. The user `tls` may only log in with TLS. */
  const url = ({ host = 'localhost', login = `tls:${ENCODED}`, query = '' } = {}) =>
    `mysql://${login}@${host}:${server.port}/holdfast${query}`

  before(async () => {
    const can = { skip: (reason) => (unable = reason) }
    if (!(await canStartServer(can, 'mysql', locateMariadb))) return
    const ca = await makeAuthority(dir).catch((error) => void (unable = `no openssl: ${error.message}`))
    if (!ca) return
    const { cert, key } = await certify(dir, 'server', { hosts: 'DNS:localhost' })
    await certify(dir, 'cert', { usage: 'clientAuth' })
    mkdirSync(file('other'))
    await makeAuthority(file('other'))
    server = await startMariadb({ tls: { cert, key, ca } })
    plain = await startMariadb()
    await withMysql(server.url, async (client) => {
      for (const [user, needs] of [
        ['app', 'NONE'],
        ['tls', 'SSL'],
        ['cert', 'X509'],
      ]) {
        await client.query(`CREATE USER ${user} IDENTIFIED BY '${PASSWORD}' REQUIRE ${needs}`)
        await client.query(`GRANT ALL ON holdfast.* TO ${user}`)
      }
    })
  })
  after(async () => {
    await Promise.all([server?.stop(), plain?.stop()])
    rmSync(dir, { recursive: true, force: true })
  })

  const test = (name, body) => it(name, { timeout: 60_000 }, (t) => (unable ? skip(t, unable) : body(t)))
  const use = async (...target) => {
    const locks = await connectWith(...target)
    try {
      assert.equal(await locks.using(['n', 'm'], (lock) => lock.isHeld), true)
    } finally {
      await locks.close()
    }
  }
  const refused = async (message, ...target) => {
    const error = await rejects(connectWith(...target), 'LOCK_STORE', { retryable: false })
    assert.match(error.message, message)
    assert.ok(!error.message.includes(PASSWORD) && !error.message.includes(ENCODED), error.message)
  }
  const tls = () => ({ caFile: file('ca.crt') })

  test('VERIFY_IDENTITY: the certificate and its name', async () => {
    for (const query of ['', '?ssl-mode=REQUIRED', '?ssl-mode=VERIFY_IDENTITY', '?ssl-mode=PREFERRED']) {
      await use(url({ query }), { tls: tls() })
      const otherName = /for another host name: .*ssl-mode=VERIFY_CA/
      await refused(otherName, url({ query, host: '127.0.0.1' }), { tls: tls() })
    }
  })

  test('VERIFY_CA: the certificate, for any name', async () => {
    await use(url({ host: '127.0.0.1', query: '?ssl-mode=VERIFY_CA' }), { tls: tls() })
  })

  test('an authority that is not trusted', async () => {
    const untrusted = /authority that is not trusted here: set tls\.caFile or tls\.ca .*ssl-mode=DISABLED/
    for (const query of ['', '?ssl-mode=REQUIRED', '?ssl-mode=VERIFY_CA', '?ssl-mode=VERIFY_IDENTITY']) {
      await refused(untrusted, url({ query }))
      await refused(untrusted, url({ query }), { tls: { caFile: join(file('other'), 'ca.crt') } })
    }
  })

  test('an authority that is exchanged while a service runs', async () => {
    const [path, other] = [file('exchanged.crt'), join(file('other'), 'ca.crt')]
    copyFileSync(file('ca.crt'), path)
    const locks = await connectWith(url(), { tls: { caFile: path } })
    const endConnections = () =>
      withMysql(server.url, async (client) => {
        const [rows] = await client.query("SELECT id FROM information_schema.processlist WHERE user = 'tls'")
        for (const { id } of rows) await client.query(`KILL ${id}`)
      })
    await exchangeAuthority(locks, { path, other, endConnections })
  })

  test('another product is refused by its version, and a read-only server gives a warning', async () => {
    const other = await startMariadb({ settings: { version: '8.0.11-TiDB-v7.5.1' } })
    try {
      await refused(/this server is TiDB \(8\.0\.11-TiDB-v7\.5\.1/, other.url)
    } finally {
      await other.stop()
    }
    await use(plain.url)
    await withMysql(plain.url, (client) => client.query('SET GLOBAL read_only = 1'))
    try {
      const code = `import { LockService } from '${INDEX}'
process.on('warning', (warning) => console.log(warning.code, warning.message))
await (await LockService.connect(${JSON.stringify(plain.url)})).close()`
      assert.match(await output(code), /^HOLDFAST_STORE .* is read-only, such as a replica/)
    } finally {
      await withMysql(plain.url, (client) => client.query('SET GLOBAL read_only = 0'))
    }
  })

  test('SSL_CERT_FILE has the authorities of the system, and --ca-file of the command line is tls.caFile', async () => {
    assert.equal((await start(['ls', '--url', url()]).ended).code, 69)
    assert.equal((await start(['ls', '--url', url(), '--ca-file', file('ca.crt')]).ended).code, 0)
    assert.equal((await start(['ls', '--url', url()], { SSL_CERT_FILE: file('ca.crt') }).ended).code, 0)
    const disabled = url({ login: `app:${ENCODED}`, query: '?ssl-mode=DISABLED' })
    const { code, stderr } = await start(['ls', '--url', disabled, '--ca-file', file('ca.crt')]).ended
    assert.equal(code, 64)
    const rule = 'must be absent, or ssl-mode=DISABLED removed from the URL'
    assert.ok(stderr.startsWith(`holdfast: tls ${rule}`), stderr)
  })

  test('tls.insecure accepts any certificate, ssl-mode=DISABLED has no TLS', async () => {
    await use(url({ host: '127.0.0.1' }), { tls: { insecure: true } })
    await refused(/\[1045\] .*a user that requires TLS needs ssl-mode=REQUIRED/i, url({ query: '?ssl-mode=DISABLED' }))
    await use(url({ login: `app:${ENCODED}`, query: '?ssl-mode=DISABLED' }))
    await rejects(
      connectWith(url({ query: '?ssl-mode=DISABLED' }), { tls: { insecure: true } }),
      'LOCK_INVALID_ARGUMENT',
    )
  })

  test('a server without TLS', async () => {
    await use(plain.url)
    await refused(/does not support TLS \(add ssl-mode=DISABLED/, `${plain.url}?ssl-mode=REQUIRED`)
  })

  test('a client certificate', async () => {
    const withCertificate = { ...tls(), certFile: file('cert.crt'), keyFile: file('cert.key') }
    await use(url({ login: `cert:${ENCODED}` }), { tls: withCertificate })
    await refused(/\[1045\] .*tls\.certFile and tls\.keyFile/, url({ login: `cert:${ENCODED}` }), { tls: tls() })
  })

  test('a statement of a call that rejects is cancelled at the server, over TLS', async () => {
    const locks = await connectWith(url(), { tls: tls(), storeTimeoutMs: 1000 })
    try {
      assert.equal(await locks.using(['n', 'm'], (lock) => lock.isHeld), true)
      await withMysql(server.url, async (client) => {
        // A statement that waits for a table ends with its connection; one that waits for a row does not.
        await client.query("BEGIN; SELECT 1 FROM locks WHERE name IN ('n', 'm') FOR UPDATE")
        const waiting = async () => {
          const [rows] = await client.query("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
          return Number(rows[0].Value)
        }
        const calls = [locks.tryAcquire('n'), locks.acquire(['n', 'm'])].map(later)
        await until('statements that wait', async () => (await waiting()) === calls.length)
        for (const call of calls) await rejects(call, 'LOCK_STORE', { retryable: true })
        await until('no statement is left', async () => (await waiting()) === 0)
        await client.query('ROLLBACK')
      })
      assert.equal(await locks.using(['n', 'm'], (lock) => lock.isHeld), true)
    } finally {
      await locks.close()
    }
  })

  test('a Unix socket', async () => {
    const locks = await connectWith(`mysql://holdfast@localhost/holdfast?socket=${encodeURIComponent(plain.socket)}`)
    try {
      const lock = await locks.acquire(['n', 'm'])
      const text = "SELECT host FROM information_schema.processlist WHERE user = 'holdfast' AND id <> CONNECTION_ID()"
      const [rows] = await withMysql(plain.url, (client) => client.query(text))
      assert.ok(rows.length > 0)
      // A connection of TCP has an address with a port.
      for (const { host } of rows) assert.equal(host, 'localhost')
      assert.equal(await lock.release(), true)
    } finally {
      await locks.close()
    }
  })

  test('passwords of the URL and of options', async () => {
    const disabled = '?ssl-mode=DISABLED'
    await use(`mysql://localhost:${server.port}/holdfast${disabled}`, { username: 'app', password: PASSWORD })
    await use(url({ login: 'app', query: disabled }), { password: PASSWORD })
    await refused(/\[1045\] .*check the user name and the password/, url({ login: 'app:wrong', query: disabled }))
  })

  test('a database that does not exist, and missing privileges', async () => {
    const of = (user, database) => `mysql://${user}@127.0.0.1:${plain.port}/${database}`
    await withMysql(plain.url, (client) =>
      client.query('CREATE USER reader; CREATE DATABASE empty; GRANT SELECT ON empty.* TO reader'),
    )
    await refused(
      /Unknown database 'none' \[1049\] \(check the database in the URL and in the option table, or create it/,
      of('holdfast', 'none'),
    )
    // A user without privileges on all databases cannot see whether one exists.
    const noAccess =
      /'none' \[1044\] \(the database does not exist, or the user has no privileges on it: create the database, or GRANT them\)/
    await refused(noAccess, of('reader', 'none'))
    const noPrivilege = /CREATE command denied .*`locks` \[1142\] \(the user needs .*SELECT, INSERT, UPDATE and DELETE/
    await refused(noPrivilege, of('reader', 'empty'))
  })

  /** Resolves to the warnings of a process that connects and uses a lock. */
  const warningsOf = (target) => {
    const code = `
      import { LockService } from ${JSON.stringify(INDEX)}
      process.on('warning', ({ code, message }) => console.log(code, message))
      const locks = await LockService.connect(process.argv[1])
      await locks.using('n', () => {})
      await locks.close()`
    return output(code, { args: [target], flags: ['--no-warnings'] })
  }

  test('a warning of innodb_flush_log_at_trx_commit', async () => {
    const set = (value) =>
      withMysql(plain.url, (client) => client.query(`SET GLOBAL innodb_flush_log_at_trx_commit = ${value}`))
    await set(2)
    const text = await warningsOf(plain.url)
    assert.match(text, /^HOLDFAST_STORE .* has innodb_flush_log_at_trx_commit = 2/)
    assert.equal(text.split('\n').length, 1)
    await set(1)
    assert.equal(await warningsOf(plain.url), '')
  })

  test('a warning of a cluster that accepts writes on several nodes', async (t) => {
    const proxy = await startProxy(plain.port)
    t.after(() => proxy.close())
    const target = plain.url.replace(`:${plain.port}`, `:${proxy.port}`)
    const [galera, group] = ['wsrep_cluster_size', 'group_replication_single_primary_mode']
    for (const [sent, name, value, isReported] of /** @type {const} */ ([
      ['SHOW GLOBAL STATUS LIKE', galera, '1', false],
      ['SHOW GLOBAL STATUS LIKE', galera, '3', true],
      ['SHOW GLOBAL VARIABLES LIKE', group, 'ON', false],
      ['SHOW GLOBAL VARIABLES LIKE', group, 'OFF', true],
    ])) {
      const statement = `${sent} '${name}'`
      let isReplaced = false
      // The server answers like a node of a cluster.
      proxy.intercept = (data) => {
        const at = data.indexOf(statement)
        if (at >= 0) data.write(`SELECT '${name}', '${value}'`.padEnd(statement.length), at)
        isReplaced ||= at >= 0
        return false
      }
      const text = await warningsOf(target)
      assert.ok(isReplaced, statement)
      if (!isReported) assert.equal(text, '')
      else assert.match(text, /^HOLDFAST_STORE \S+ is a node of a cluster that accepts writes on several nodes/)
    }
  })
})
