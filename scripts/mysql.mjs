// Starts servers for the tests and the benchmark: of MariaDB, and MySQL's own.
import { execFile } from 'node:child_process'
import { chmod, chown, copyFile, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { promisify } from 'node:util'
import { account } from './programs.mjs'
import { startServer } from './servers.mjs'
import { locateMariadb, locateMysql, locateOfMariadb } from './sql-binaries.mjs'

const run = promisify(execFile)

export { locateMariadb, locateMysql }

/**
 * Starts a MariaDB server with the user `holdfast`, all privileges and no password. Without `fsync` a commit does not wait for the
 * disk. `tls`: paths of its certificate, its key and the authority of clients.
 *
 * @param {{ fsync?: boolean, settings?: Record<string, string | number>, tls?: import('./postgres.mjs').PostgresTls }} [options]
 */
export async function startMariadb({ fsync = false, settings = {}, tls } = {}) {
  const [path, installer, client] = await Promise.all(
    ['mariadbd', 'mariadb-install-db', 'mariadb'].map(locateOfMariadb),
  )
  const user = await account('mysql', path)
  return startServer(async (dir, port) => {
    const data = join(dir, 'data')
    if (user) await chown(dir, user.uid, user.gid)
    const install = ['--no-defaults', `--datadir=${data}`, '--auth-root-authentication-method=normal', '--skip-test-db']
    // A server removes the temporary tables of others in the same folder when it starts.
    const env = { ...process.env, TMPDIR: dir }
    await run(installer, [...install, '--innodb-log-file-size=16M'], { ...user, cwd: dir, env })
    /** @type {Record<string, string>} */
    const files = {}
    for (const [name, path] of Object.entries(tls ?? {})) {
      files[`ssl_${name}`] = join(dir, `tls-${name}`)
      await copyFile(path, join(dir, `tls-${name}`))
      await chmod(join(dir, `tls-${name}`), 0o600)
      if (user) await chown(join(dir, `tls-${name}`), user.uid, user.gid)
    }
    const all = {
      datadir: data,
      port,
      bind_address: '127.0.0.1',
      socket: join(dir, 'socket'),
      pid_file: join(dir, 'server-pid'),
      tmpdir: dir,
      // Otherwise the server resolves the name of each client.
      skip_name_resolve: 1,
      innodb_buffer_pool_size: '64M',
      innodb_log_file_size: '16M',
      // With another value `connect` warns.
      innodb_flush_log_at_trx_commit: 1,
      innodb_flush_method: fsync ? 'fsync' : 'nosync',
      max_connections: 300,
      ...files,
      ...settings,
    }
    const flags = Object.entries(all).map(([name, value]) => `--${name.replaceAll('_', '-')}=${value}`)
    return {
      argv: [path, '--no-defaults', ...flags],
      user,
      ready: async (log) => /ready for connections/.test(log) && (await createUserAndDatabase(client, dir)),
      properties: { url: `mysql://holdfast@127.0.0.1:${port}/holdfast`, socket: all.socket },
    }
  })
}

/** Starts MySQL's own server, which creates its certificates, with the user `holdfast`, all privileges and no password. */
export async function startMysql() {
  const path = await locateMysql()
  const user = await account('mysql', path)
  return startServer(async (dir, port) => {
    const data = join(dir, 'data')
    if (user) await chown(dir, user.uid, user.gid)
    const env = { ...process.env, TMPDIR: dir }
    await run(path, ['--no-defaults', '--initialize-insecure', `--datadir=${data}`], { ...user, cwd: dir, env })
    const statements = [
      'CREATE DATABASE holdfast',
      'CREATE USER holdfast',
      'GRANT ALL ON *.* TO holdfast WITH GRANT OPTION',
    ]
    await writeFile(join(dir, 'init.sql'), `${statements.join(';\n')};\n`)
    const settings = {
      datadir: data,
      port,
      bind_address: '127.0.0.1',
      socket: join(dir, 'socket'),
      pid_file: join(dir, 'server-pid'),
      init_file: join(dir, 'init.sql'),
      mysqlx: 'OFF',
      secure_file_priv: 'NULL',
      skip_log_bin: 1,
      innodb_buffer_pool_size: '64M',
    }
    const flags = Object.entries(settings).map(([name, value]) => `--${name.replaceAll('_', '-')}=${value}`)
    return {
      argv: [path, '--no-defaults', ...flags],
      user,
      ready: async (log) => /ready for connections/.test(log),
      properties: { url: `mysql://holdfast@127.0.0.1:${port}/holdfast`, caFile: join(data, 'ca.pem') },
    }
  })
}

/** Creates the user and the database. Resolves to whether the server has done it. @param {string} client @param {string} dir */
async function createUserAndDatabase(client, dir) {
  const text =
    'CREATE DATABASE IF NOT EXISTS holdfast; CREATE USER IF NOT EXISTS holdfast; GRANT ALL ON *.* TO holdfast WITH GRANT OPTION'
  const flags = ['--no-defaults', `--socket=${join(dir, 'socket')}`, '--user=root', '--execute', text]
  return run(client, flags).then(
    () => true,
    () => false,
  )
}
