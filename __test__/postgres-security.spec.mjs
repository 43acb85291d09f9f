// TLS, sockets and logins on PostgreSQL, and what they take from other options of the URL, the environment and the password file.
import assert from 'node:assert/strict'
import { chmodSync, writeFileSync } from 'node:fs'
import { dirname } from 'node:path'
import { postgres } from './drivers/postgres.mjs'
import { connectWith } from './stores.mjs'
import { security } from './suites/security.mjs'
import { rejects } from './tools.mjs'

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

security(postgres, ({ test, works, refused, servers, file, LOGIN, PASSWORD }) => {
  const open = (login, query) => `postgres://${login}@127.0.0.1:${servers.open.port}/postgres?${query}`
  const encoded = (name) => encodeURIComponent(file(name))

  test('hostaddr, sslrootcert, sslcert and sslkey', async () => {
    const tls = { caFile: file('ca.crt') }
    const named = `postgres://${LOGIN}@db.example:${servers.open.port}/postgres?hostaddr=127.0.0.1`
    await works(`${named}&sslmode=verify-full`, { tls }, true)
    await works(named, { tls }, true)
    await works(`${named}&sslmode=require&sslrootcert=${encoded('ca.crt')}`, {}, true)
    const files = Object.entries({ sslrootcert: 'ca.crt', sslcert: 'cert.crt', sslkey: 'cert.key' })
    const query = files.map(([option, name]) => `&${option}=${encoded(name)}`).join('')
    await works(open('cert', `sslmode=verify-ca${query}`), {}, true)
    for (const [option] of files) {
      const url = open(LOGIN, `sslmode=disable&${option}=${encoded('ca.crt')}`)
      const { message } = await rejects(connectWith(url), 'LOCK_INVALID_ARGUMENT')
      assert.ok(message.startsWith(`${option} must be absent, or sslmode=disable removed from the URL`), message)
    }
  })

  test('PGSSLMODE and PGSSLROOTCERT', async () => {
    const url = `postgres://${LOGIN}@127.0.0.1:${servers.open.port}/postgres`
    const variables = { PGSSLMODE: 'verify-ca', PGSSLROOTCERT: file('ca.crt') }
    await withEnvironment(variables, () => works(url, {}, true))
    await withEnvironment({ PGSSLMODE: 'disable' }, () => works(url, {}, false))
    const error = await withEnvironment({ PGSSLROOTCERT: file('none') }, () =>
      rejects(connectWith(url), 'LOCK_INVALID_ARGUMENT'),
    )
    assert.match(error.message, /^PGSSLROOTCERT must be a PEM file/)
  })

  test('passwords of options and of the environment', async () => {
    const url = postgres.url({ ...servers.users, login: 'app' })
    for (const password of [PASSWORD, () => PASSWORD]) await works(url, { password })
    const variables = {
      PGHOST: '127.0.0.1',
      PGPORT: String(servers.users.port),
      PGUSER: 'app',
      PGPASSWORD: PASSWORD,
      PGDATABASE: 'postgres',
      PGSSLMODE: 'disable',
    }
    await withEnvironment(variables, () => works('postgres://'))
  })

  test('the password file', async () => {
    const path = file('.pgpass')
    const lines = ['other:*:*:*:wrong', `127.0.0.1:${servers.users.port}:postgres:app:${PASSWORD.replace(':', '\\:')}`]
    writeFileSync(path, `# comment\n${lines.join('\n')}\n`, { mode: 0o600 })
    const app = postgres.url({ ...servers.users, login: 'app' })
    await withEnvironment({ PGPASSFILE: path }, () => works(app))
    // In the home folder of the user.
    if (process.platform !== 'win32') await withEnvironment({ HOME: dirname(path) }, () => works(app))
    await withEnvironment({ PGPASSFILE: file('none') }, () =>
      refused(app, {}, /the server requires a password.*~\/\.pgpass/),
    )
    if (process.platform === 'win32') return
    chmodSync(path, 0o644)
    const warned = new Promise((resolve) => process.once('warning', resolve))
    await withEnvironment({ PGPASSFILE: path }, () => refused(app, {}, /the server requires a password/))
    const warning = /** @type {any} */ (await warned)
    assert.deepEqual([warning.name, warning.code], ['HoldfastWarning', 'HOLDFAST_STORE'])
    assert.match(warning.message, /\.pgpass is ignored: other users may access it.*0600/)
  })
})
