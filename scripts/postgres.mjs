// Starts PostgreSQL servers for the tests and the benchmark.
import { execFile } from 'node:child_process'
import { access, appendFile, chown, constants, readdir } from 'node:fs/promises'
import { delimiter, join } from 'node:path'
import { promisify } from 'node:util'
import { startServer } from './servers.mjs'

const run = promisify(execFile)
/** Where Debian installs the server, which it does not put on the PATH. */
const DEBIAN = '/usr/lib/postgresql'

/** Finds the folder with `postgres` and `initdb`. */
export async function locatePostgres() {
  const versions = await readdir(DEBIAN).catch(() => [])
  const debian = versions.sort((a, b) => Number(b) - Number(a)).map((version) => join(DEBIAN, version, 'bin'))
  for (const folder of [...(process.env.PATH ?? '').split(delimiter).filter(Boolean), ...debian]) {
    const isThere = await access(join(folder, 'initdb'), constants.X_OK).then(
      () => true,
      () => false,
    )
    if (isThere) return folder
  }
  throw new Error('no postgres on PATH or in /usr/lib/postgresql: install PostgreSQL, or set HOLDFAST_TEST_POSTGRES_URL')
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

/** Returns the account that runs a server: PostgreSQL refuses to run as root. `undefined`: this process's. */
async function account() {
  if (process.getuid?.() !== 0) return undefined
  /** @param {string} name */
  const ids = async (name) => {
    const [uid, gid] = await Promise.all(['-u', '-g'].map(async (flag) => Number((await run('id', [flag, name])).stdout)))
    return { uid, gid }
  }
  return ids('postgres').catch(() => ids('nobody'))
}
