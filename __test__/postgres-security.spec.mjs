// TLS, sockets and logins on PostgreSQL: what is verified, where the password comes from, and the messages of connections that cannot work.
import assert from 'node:assert/strict'
import { chmodSync, copyFileSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { certify, makeAuthority } from '../scripts/certificates.mjs'
import { locatePostgres, startPostgres } from '../scripts/postgres.mjs'
import { LockService } from '../index.js'
import { start } from './cli.mjs'
import { withPostgres } from './postgres-client.mjs'
import { exchangeAuthority } from './sql-faults.mjs'
import { canStartServer, connectWith, skip } from './stores.mjs'
import { INDEX, later, output, rejects, until } from './tools.mjs'

/** The rules of the server: the tests' own user without TLS, `app` with a password, `tls` with TLS, `cert` with a certificate. */
const HBA = [
  'host all holdfast 127.0.0.1/32 trust',
  'host all app 127.0.0.1/32 scram-sha-256',
  'hostssl all tls 127.0.0.1/32 scram-sha-256',
  'hostssl all cert 127.0.0.1/32 cert',
]
const PASSWORD = 'p@ss:w/rd'
const ENCODED = encodeURIComponent(PASSWORD)

/** Calls a function with variables of the environment, which `connect` reads before it returns. */
function withEnvironment(variables, call) {
  const before = { ...process.env }
  Object.assign(process.env, variables)
  try {
    return call()
  } finally {
    for (const name of Object.keys(variables)) {
      if (before[name] === undefined) delete process.env[name]
      else process.env[name] = before[name]
    }
  }
}

describe('postgres: TLS and logins', { concurrency: 1 }, () => {
  const dir = mkdtempSync(join(tmpdir(), 'holdfast-postgres-'))
  /** @type {Awaited<ReturnType<typeof startPostgres>>} */
  let server
  /** @type {Awaited<ReturnType<typeof startPostgres>>} */
  let plain
  /** @type {string | undefined} */
  let unable
  const file = (name) => join(dir, name)
  /** The URL of the server, which has a certificate for `db.example`. */
  const url = ({ host = '127.0.0.1', login = 'holdfast', query = '' } = {}) =>
    `postgres://${login}@${host}:${server.port}/postgres${query}`

  before(async () => {
    const can = { skip: (reason) => (unable = reason) }
    if (!(await canStartServer(can, 'postgres', locatePostgres))) return
    const ca = await makeAuthority(dir).catch((error) => void (unable = `no openssl: ${error.message}`))
    if (!ca) return
    const { cert, key } = await certify(dir, 'server', { hosts: 'DNS:db.example' })
    await certify(dir, 'cert', { usage: 'clientAuth' })
    mkdirSync(file('other'))
    await makeAuthority(file('other'))
    server = await startPostgres({ tls: { cert, key, ca }, hba: HBA })
    plain = await startPostgres({ hasSocket: true })
    await withPostgres(url(), async (client) => {
      for (const role of ['app', 'tls', 'cert']) {
        await client.query(`CREATE ROLE ${role} LOGIN PASSWORD '${PASSWORD}'`)
        await client.query(`GRANT CREATE ON DATABASE postgres TO ${role}`)
      }
    })
    // The tables have an owner that all tests may use.
    await (await LockService.connect(url({ query: '?sslmode=disable' }))).close()
    await withPostgres(url(), (client) =>
      client.query(
        'GRANT USAGE, CREATE ON SCHEMA holdfast TO app, tls, cert; GRANT ALL ON holdfast.locks, holdfast.locks_waiters TO app, tls, cert',
      ),
    )
  })
  after(async () => {
    await Promise.all([server?.stop(), plain?.stop()])
    rmSync(dir, { recursive: true, force: true })
  })

  const test = (name, body) => it(name, { timeout: 60_000 }, (t) => (unable ? skip(t, unable) : body(t)))
  /** Uses a lock, and resolves to whether the connections have TLS. */
  const use = async (...target) => {
    const locks = await connectWith(...target)
    try {
      assert.equal(await locks.using('n', (lock) => lock.isHeld), true)
      return await withPostgres(url(), async (client) => {
        const { rows } = await client.query(
          "SELECT bool_and(ssl) AS ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'holdfast'",
        )
        return rows[0].ssl
      })
    } finally {
      await locks.close()
      await until('the connections have ended', async () => {
        const text = "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast'"
        return (await withPostgres(url(), (client) => client.query(text))).rows.length === 0
      })
    }
  }
  const refused = async (message, ...target) => {
    const error = await rejects(connectWith(...target), 'LOCK_STORE', { retryable: false })
    assert.match(error.message, message)
    assert.ok(!error.message.includes(PASSWORD) && !error.message.includes(ENCODED), error.message)
  }

  const named = (query) => url({ host: 'db.example', query: `?hostaddr=127.0.0.1${query}` })
  test('verify-full: the certificate and its name', async () => {
    const tls = { caFile: file('ca.crt') }
    assert.equal(await use(named('&sslmode=verify-full'), { tls }), true)
    assert.equal(await use(named(''), { tls }), true)
    assert.equal(await use(named(`&sslmode=require&sslrootcert=${encodeURIComponent(file('ca.crt'))}`)), true)
    for (const query of ['', '?sslmode=require', '?sslmode=verify-full', '?sslmode=prefer'])
      await refused(/for another host name.*hostaddr.*sslmode=verify-ca/, url({ query }), { tls })
  })

  test('verify-ca: the certificate, for any name', async () => {
    assert.equal(await use(url({ query: '?sslmode=verify-ca' }), { tls: { caFile: file('ca.crt') } }), true)
  })

  test('an authority that is not trusted', async () => {
    const untrusted = /authority that is not trusted here: set tls\.caFile or tls\.ca/
    for (const query of ['', '?sslmode=require', '?sslmode=verify-ca', '?sslmode=verify-full']) {
      await refused(untrusted, url({ query }))
      await refused(untrusted, url({ query }), { tls: { caFile: join(file('other'), 'ca.crt') } })
    }
  })

  test('an authority that is exchanged while a service runs', async () => {
    const [path, other] = [file('exchanged.crt'), join(file('other'), 'ca.crt')]
    copyFileSync(file('ca.crt'), path)
    const locks = await LockService.connect(named(''), { tls: { caFile: path } })
    const endConnections = () =>
      withPostgres(url(), (client) =>
        client.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holdfast'"),
      )
    await exchangeAuthority(locks, { path, other, endConnections })
  })

  test('SSL_CERT_FILE has the authorities of the system, and --ca-file of the command line is tls.caFile', async () => {
    const to = named('')
    assert.equal((await start(['ls', '--url', to]).ended).code, 69)
    assert.equal((await start(['ls', '--url', to, '--ca-file', file('ca.crt')]).ended).code, 0)
    assert.equal((await start(['ls', '--url', to], { SSL_CERT_FILE: file('ca.crt') }).ended).code, 0)
    const { code, stderr } = await start(['ls', '--url', url({ query: disable }), '--ca-file', file('ca.crt')]).ended
    assert.equal(code, 64)
    const rule = 'must be absent, or sslmode=disable removed from the URL'
    assert.ok(stderr.startsWith(`holdfast: tls ${rule}`), stderr)
  })

  test('tls.insecure accepts any certificate, sslmode=disable has no TLS', async () => {
    assert.equal(await use(url(), { tls: { insecure: true } }), true)
    assert.equal(await use(url({ query: '?sslmode=disable' })), false)
    await rejects(connectWith(url({ query: '?sslmode=disable' }), { tls: { insecure: true } }), 'LOCK_INVALID_ARGUMENT')
    for (const option of ['sslrootcert', 'sslcert', 'sslkey']) {
      const query = `?sslmode=disable&${option}=${encodeURIComponent(file('ca.crt'))}`
      const { message } = await rejects(connectWith(url({ query })), 'LOCK_INVALID_ARGUMENT')
      assert.ok(message.startsWith(`${option} must be absent, or sslmode=disable removed from the URL`), message)
    }
  })

  test('PGSSLMODE and PGSSLROOTCERT', async () => {
    const variables = { PGSSLMODE: 'verify-ca', PGSSLROOTCERT: file('ca.crt') }
    assert.equal(await withEnvironment(variables, () => use(url())), true)
    assert.equal(await withEnvironment({ PGSSLMODE: 'disable' }, () => use(url())), false)
    const error = await withEnvironment({ PGSSLROOTCERT: file('none') }, () =>
      rejects(connectWith(url()), 'LOCK_INVALID_ARGUMENT'),
    )
    assert.match(error.message, /^PGSSLROOTCERT must be a PEM file/)
  })

  test('servers without TLS, and that expect TLS', async () => {
    await refused(/the server has no TLS: add sslmode=disable/, `${plain.url}?sslmode=require`)
    await refused(
      /the server may expect TLS: add sslmode=require/,
      url({ login: `tls:${ENCODED}`, query: '?sslmode=disable' }),
    )
  })

  test('a client certificate instead of a password', async () => {
    const tls = { caFile: file('ca.crt'), certFile: file('cert.crt'), keyFile: file('cert.key') }
    assert.equal(await use(url({ login: 'cert', query: '?sslmode=verify-ca' }), { tls }), true)
    await refused(/set tls\.certFile and tls\.keyFile/, url({ login: 'cert', query: '?sslmode=verify-ca' }), {
      tls: { caFile: file('ca.crt') },
    })
    const files = Object.entries({ sslrootcert: 'ca.crt', sslcert: 'cert.crt', sslkey: 'cert.key' })
    const query = files.map(([option, name]) => `&${option}=${encodeURIComponent(file(name))}`)
    assert.equal(await use(url({ login: 'cert', query: `?sslmode=verify-ca${query.join('')}` })), true)
  })

  test('a statement of a call that rejects is cancelled at the server, over TLS', async () => {
    const options = { tls: { caFile: file('ca.crt') }, storeTimeoutMs: 1000 }
    const locks = await connectWith(
      url({ host: 'db.example', login: `tls:${ENCODED}`, query: '?hostaddr=127.0.0.1&sslmode=verify-full' }),
      options,
    )
    try {
      assert.equal(await locks.using(['n', 'm'], (lock) => lock.isHeld), true)
      await withPostgres(url(), async (client) => {
        await client.query('BEGIN; LOCK TABLE holdfast.locks, holdfast.locks_waiters')
        const waiting = async () =>
          (
            await client.query(
              `SELECT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
                WHERE application_name = 'holdfast' AND wait_event_type = 'Lock'`,
            )
          ).rows
        for (const names of ['n', ['n', 'm']]) {
          const call = later(locks.acquire(names))
          const statements = await until('a statement that waits', async () => {
            const rows = await waiting()
            return rows.length > 0 && rows
          })
          assert.ok(statements.every(({ ssl }) => ssl))
          await rejects(call, 'LOCK_STORE', { retryable: true })
          await until('no statement is left', async () => (await waiting()).length === 0)
        }
        await client.query('ROLLBACK')
      })
      assert.equal(await locks.using(['n', 'm'], (lock) => lock.isHeld), true)
    } finally {
      await locks.close()
    }
  })

  test('a Unix socket', async () => {
    const socket = encodeURIComponent(plain.socket)
    for (const target of [
      `postgres://holdfast@/postgres?host=${socket}&port=${plain.port}`,
      `postgres://holdfast@${socket}:${plain.port}/postgres`,
    ]) {
      const locks = await connectWith(target)
      try {
        const lock = await locks.acquire(['n', 'm'])
        const text = "SELECT client_addr FROM pg_stat_activity WHERE application_name = 'holdfast'"
        const { rows } = await withPostgres(plain.url, (client) => client.query(text))
        assert.ok(rows.length > 0)
        for (const { client_addr } of rows) assert.equal(client_addr, null, target)
        assert.equal(await lock.release(), true)
      } finally {
        await locks.close()
      }
    }
  })

  const disable = '?sslmode=disable'
  test('passwords of the URL, of options and of the environment', async () => {
    await use(url({ login: `app:${ENCODED}`, query: disable }))
    const address = `postgres://127.0.0.1:${server.port}/postgres${disable}`
    await use(address, { username: 'app', password: PASSWORD })
    for (const password of [PASSWORD, () => PASSWORD]) await use(url({ login: 'app', query: disable }), { password })
    const variables = {
      PGHOST: '127.0.0.1',
      PGPORT: String(server.port),
      PGUSER: 'app',
      PGPASSWORD: PASSWORD,
      PGDATABASE: 'postgres',
    }
    await withEnvironment({ ...variables, PGSSLMODE: 'disable' }, () => use('postgres://'))
    await refused(/check the user name and the password.*percent-encoded/, url({ login: 'app:wrong', query: disable }))
  })

  test('the password file', async () => {
    const path = file('.pgpass')
    const lines = ['other:*:*:*:wrong', `127.0.0.1:${server.port}:postgres:app:${PASSWORD.replace(':', '\\:')}`]
    writeFileSync(path, `# comment\n${lines.join('\n')}\n`, { mode: 0o600 })
    const app = url({ login: 'app', query: disable })
    await withEnvironment({ PGPASSFILE: path }, () => use(app))
    // In the home folder of the user.
    if (process.platform !== 'win32') await withEnvironment({ HOME: dir }, () => use(app))
    await withEnvironment({ PGPASSFILE: file('none') }, () =>
      refused(/the server requires a password.*~\/\.pgpass/, app),
    )
    if (process.platform === 'win32') return
    chmodSync(path, 0o644)
    const warned = new Promise((resolve) => process.once('warning', resolve))
    await withEnvironment({ PGPASSFILE: path }, () => refused(/the server requires a password/, app))
    const warning = /** @type {any} */ (await warned)
    assert.deepEqual([warning.name, warning.code], ['HoldfastWarning', 'HOLDFAST_STORE'])
    assert.match(warning.message, /\.pgpass is ignored: other users may access it.*0600/)
  })

  test('a password that rotates', async (t) => {
    let [password, calls] = [PASSWORD, 0]
    const credentials = () => {
      calls++
      return { username: 'app', password }
    }
    const address = `postgres://127.0.0.1:${server.port}/postgres${disable}`
    const locks = await LockService.connect(address, { credentials, storeTimeoutMs: 4000 })
    t.after(() => locks.close())
    const held = await locks.acquire('held', { ttlMs: 9000 })
    const before = calls
    assert.ok(before > 0)
    await withPostgres(url(), async (client) => {
      await client.query("ALTER ROLE app PASSWORD 'two'")
      await client.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'")
    })
    // The function still returns the old password: that is no permanent error.
    await rejects(locks.acquire('other', { waitMs: 500 }), 'LOCK_STORE', { retryable: true })
    password = 'two'
    const { renewed } = locks.stats()
    await until('the lease is renewed on a new connection', () => locks.stats().renewed > renewed)
    assert.ok(calls > before)
    assert.equal(await held.release(), true)
    await withPostgres(url(), (client) => client.query(`ALTER ROLE app PASSWORD '${PASSWORD}'`))
    const failing = LockService.connect(address, { credentials: () => Promise.reject(new Error('no token')) })
    const error = await rejects(failing, 'LOCK_STORE', { retryable: true })
    assert.match(error.message, /no login for a new connection: .*failed: no token/)
  })

  test('a warning of synchronous_commit = off', async () => {
    await withPostgres(url(), (client) => client.query('ALTER ROLE app SET synchronous_commit = off'))
    const code = `
      import { LockService } from ${JSON.stringify(INDEX)}
      process.on('warning', ({ code, message }) => console.log(code, message))
      const locks = await LockService.connect(process.argv[1])
      await locks.using('n', () => {})
      await locks.close()`
    const app = url({ login: `app:${ENCODED}`, query: disable })
    const text = await output(code, { args: [app], flags: ['--no-warnings'] })
    assert.match(text, /^HOLDFAST_STORE PostgreSQL at .* has synchronous_commit = off/)
    assert.equal(text.split('\n').length, 1)
    await withPostgres(url(), (client) => client.query('ALTER ROLE app RESET synchronous_commit'))
    assert.equal(await output(code, { args: [app], flags: ['--no-warnings'] }), '')
  })
})
