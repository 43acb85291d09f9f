// Starts PostgreSQL servers for the tests and the benchmark.
import { execFile } from 'node:child_process'
import { access, appendFile, chown, constants, readdir, writeFile } from 'node:fs/promises'
import { delimiter, join } from 'node:path'
import { promisify } from 'node:util'
import { startServer } from './servers.mjs'

const run = promisify(execFile)
/** Where Debian installs the server, which it does not put on the PATH. */
const DEBIAN = '/usr/lib/postgresql'

/** @param {string} path */
const isRunnable = (path) =>
  access(path, constants.X_OK).then(
    () => true,
    () => false,
  )

/** Finds the folder with `postgres` and `initdb`. */
export async function locatePostgres() {
  const versions = await readdir(DEBIAN).catch(() => [])
  const debian = versions.sort((a, b) => Number(b) - Number(a)).map((version) => join(DEBIAN, version, 'bin'))
  for (const folder of [...(process.env.PATH ?? '').split(delimiter).filter(Boolean), ...debian]) {
    if (await isRunnable(join(folder, 'initdb'))) return folder
  }
  throw new Error(
    'no postgres on PATH or in /usr/lib/postgresql: install PostgreSQL, or set HOLDFAST_TEST_POSTGRES_URL',
  )
}

/**
 * Starts a PostgreSQL server with the superuser `holdfast` and no password. Without `fsync` a commit does not wait for the disk.
 *
 * @param {{ fsync?: boolean, settings?: Record<string, string | number> }} [options]
 */
export async function startPostgres({ fsync = false, settings = {} } = {}) {
  const bin = await locatePostgres()
  const user = await account()
  return startServer(async (dir, port) => {
    const data = join(dir, 'data')
    if (user) await chown(dir, user.uid, user.gid)
    const options = ['--username=holdfast', '--auth=trust', '--no-locale', '--encoding=UTF8', '--no-sync']
    await run(join(bin, 'initdb'), [...options, data], { ...user, cwd: dir })
    const all = {
      listen_addresses: "'127.0.0.1'",
      port,
      unix_socket_directories: "''",
      fsync: fsync ? 'on' : 'off',
      // In the folder, so that a killed server leaves nothing in /dev/shm.
      dynamic_shared_memory_type: 'mmap',
      shared_buffers: "'32MB'",
      max_connections: 200,
      ...settings,
    }
    const lines = Object.entries(all).map(([name, value]) => `${name} = ${value}\n`)
    await appendFile(join(data, 'postgresql.conf'), lines.join(''))
    return {
      argv: [join(bin, 'postgres'), '-D', data],
      // A killed server would leave its shared memory.
      stopSignal: 'SIGQUIT',
      user,
      ready: async (log) => /ready to accept connections/.test(log),
      properties: { url: `postgres://holdfast@127.0.0.1:${port}/postgres` },
    }
  })
}

/**
 * Starts a PostgreSQL server behind a PgBouncer in transaction mode. `url` leads to the pooler and does not declare it.
 */
export async function startPgBouncer() {
  const path = await locatePgBouncer()
  const server = await startPostgres()
  const user = await account()
  const pooler = await startServer(async (dir, port) => {
    const settings = {
      listen_addr: '127.0.0.1',
      listen_port: port,
      unix_socket_dir: '',
      pool_mode: 'transaction',
      auth_type: 'any',
      default_pool_size: 20,
      max_client_conn: 500,
    }
    const lines = Object.entries(settings).map(([name, value]) => `${name} = ${value}\n`)
    const database = `* = host=127.0.0.1 port=${server.port} user=holdfast\n`
    const file = join(dir, 'pgbouncer.ini')
    await writeFile(file, `[databases]\n${database}[pgbouncer]\n${lines.join('')}`)
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

/** Finds `pgbouncer`, which Debian installs outside of the PATH of most users. */
async function locatePgBouncer() {
  for (const folder of [...(process.env.PATH ?? '').split(delimiter).filter(Boolean), '/usr/sbin'])
    if (await isRunnable(join(folder, 'pgbouncer'))) return join(folder, 'pgbouncer')
  throw new Error('no pgbouncer on PATH: install PgBouncer, or set HOLDFAST_TEST_PGBOUNCER_URL')
}

/** Returns the account that runs a server: PostgreSQL refuses to run as root. `undefined`: this process's. */
async function account() {
  if (process.getuid?.() !== 0) return undefined
  /** @param {string} name */
  const ids = async (name) => {
    const [uid, gid] = await Promise.all(
      ['-u', '-g'].map(async (flag) => Number((await run('id', [flag, name])).stdout)),
    )
    return { uid, gid }
  }
  return ids('postgres').catch(() => ids('nobody'))
}
