// Starts PostgreSQL servers for the tests and the benchmark.
import { execFile } from 'node:child_process'
import { appendFile, chmod, chown, copyFile, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { promisify } from 'node:util'
import { locatePgBouncer, locatePostgres } from './sql-binaries.mjs'
import { account } from './programs.mjs'
import { startServer } from './servers.mjs'

export { locatePgBouncer, locatePostgres }

const run = promisify(execFile)

/**
 * Starts a PostgreSQL server with the superuser `holdfast` and no password. Without `fsync` a commit does not wait for the disk.
 *
 * `tls`: paths of its certificate, its key and the authority of clients. `hba`: its rules for logins. `standbyOf`: another server,
 * whose standby it is. With `hasSocket` it has a Unix socket in the folder `socket`.
 *
 * @typedef {{ cert: string, key: string, ca: string }} PostgresTls
 * @typedef {{ fsync?: boolean, settings?: Record<string, string | number>, tls?: PostgresTls, hba?: string[], standbyOf?: { port: number }, hasSocket?: boolean }} PostgresOptions
 * @param {PostgresOptions} [options]
 */
export async function startPostgres({ fsync = false, settings = {}, tls, hba, standbyOf, hasSocket = false } = {}) {
  const bin = await locatePostgres()
  const user = await account('postgres', join(bin, 'postgres'))
  return startServer(async (dir, port) => {
    const data = join(dir, 'data')
    if (user) await chown(dir, user.uid, user.gid)
    if (standbyOf) {
      const primary = ['-h', '127.0.0.1', '-p', String(standbyOf.port), '-U', 'holdfast']
      const copy = ['--write-recovery-conf', '--wal-method=stream', '--checkpoint=fast', '--no-sync']
      await run(join(bin, 'pg_basebackup'), [...primary, ...copy, '-D', data], { ...user, cwd: dir })
    } else {
      const options = ['--username=holdfast', '--auth=trust', '--no-locale', '--encoding=UTF8', '--no-sync']
      await run(join(bin, 'initdb'), [...options, data], { ...user, cwd: dir })
    }
    if (hba) await writeFile(join(data, 'pg_hba.conf'), `${hba.join('\n')}\n`)
    const all = {
      listen_addresses: "'127.0.0.1'",
      port,
      unix_socket_directories: hasSocket ? `'${dir}'` : "''",
      fsync: fsync ? 'on' : 'off',
      // In the folder, so that a killed server leaves nothing in /dev/shm.
      dynamic_shared_memory_type: 'mmap',
      shared_buffers: "'32MB'",
      max_connections: 200,
      ...(tls ? await tlsSettings(dir, tls, user) : {}),
      ...settings,
    }
    const lines = Object.entries(all).map(([name, value]) => `${name} = ${value}\n`)
    await appendFile(join(data, 'postgresql.conf'), lines.join(''))
    return {
      argv: [join(bin, 'postgres'), '-D', data],
      // A killed server would leave its shared memory.
      stopSignal: 'SIGQUIT',
      // With SIGTERM it would wait for its clients.
      restartSignal: 'SIGINT',
      user,
      ready: async (log) => /ready to accept (read[- ]only )?connections/.test(log),
      properties: { url: `postgres://holdfast@127.0.0.1:${port}/postgres`, socket: hasSocket ? dir : '' },
    }
  })
}

/** Returns the settings for TLS. The server accepts only a key of its own user. @param {string} dir @param {PostgresTls} tls @param {import('./servers.mjs').User | undefined} user */
async function tlsSettings(dir, { cert, key, ca }, user) {
  const copies = { ssl_cert_file: cert, ssl_key_file: key, ssl_ca_file: ca }
  /** @type {Record<string, string>} */
  const settings = { ssl: 'on' }
  for (const [name, path] of Object.entries(copies)) {
    const copy = join(dir, name)
    await copyFile(path, copy)
    await chmod(copy, 0o600)
    if (user) await chown(copy, user.uid, user.gid)
    settings[name] = `'${copy}'`
  }
  return settings
}

/**
 * Starts a PostgreSQL server behind a PgBouncer in transaction mode. `url` leads to the pooler and does not declare it.
 * The database `sessions` of the pooler is `postgres` in session mode.
 *
 * @param {Record<string, string | number>} [more] settings of the pooler
 */
export async function startPgBouncer(more = {}) {
  const path = await locatePgBouncer()
  const user = await account('postgres', path)
  const server = await startPostgres()
  const pooler = await startServer(async (dir, port) => {
    const settings = {
      listen_addr: '127.0.0.1',
      listen_port: port,
      unix_socket_dir: '',
      pool_mode: 'transaction',
      auth_type: 'any',
      default_pool_size: 20,
      max_client_conn: 500,
      ...more,
    }
    const lines = Object.entries(settings).map(([name, value]) => `${name} = ${value}\n`)
    const database = `host=127.0.0.1 port=${server.port} user=holdfast`
    const databases = `* = ${database}\nsessions = ${database} dbname=postgres pool_mode=session\n`
    const file = join(dir, 'pgbouncer.ini')
    await writeFile(file, `[databases]\n${databases}[pgbouncer]\n${lines.join('')}`)
    if (user) for (const each of [dir, file]) await chown(each, user.uid, user.gid)
    return {
      argv: [path, file],
      user,
      ready: async (log) => /process up/.test(log),
      properties: { url: `postgres://holdfast@127.0.0.1:${port}/postgres` },
    }
  }).catch(async (error) => {
    await server.stop()
    throw error
  })
  return { url: pooler.url, server, stop: () => Promise.all([pooler.stop(), server.stop()]) }
}
