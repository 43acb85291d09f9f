// Finds and fetches the programs of PostgreSQL, PgBouncer, MariaDB and MySQL.
import { mkdir, readdir, realpath, writeFile } from 'node:fs/promises'
import { dirname, join } from 'node:path'
import { findProgram, isRunnable } from './programs.mjs'
import { FETCHED, keep, unpackDebian } from './servers-cli.mjs'

/** Where Debian installs the server, which it does not put on the PATH. */
const DEBIAN = '/usr/lib/postgresql'

/** Finds or fetches the folder with `postgres` and `initdb`. */
export async function locatePostgres() {
  const versions = await readdir(DEBIAN).catch(() => [])
  const debian = versions.sort((a, b) => Number(b) - Number(a)).map((version) => join(DEBIAN, version, 'bin'))
  const path = await locate('initdb', debian, fetchPostgres, 'PostgreSQL, or set HOLDFAST_TEST_POSTGRES_URL')
  // The other programs are beside it, or beside the file that it is a link to.
  const isComplete = await isRunnable(join(dirname(path), 'pg_basebackup'))
  return dirname(isComplete ? path : await realpath(path))
}

/** Finds or fetches `pgbouncer`, which Debian installs outside of the PATH of most users. Resolves to its path. */
export const locatePgBouncer = () =>
  locate('pgbouncer', ['/usr/sbin'], fetchPostgres, 'PgBouncer, or set HOLDFAST_TEST_PGBOUNCER_URL')

/** Finds or fetches `mariadbd`. Resolves to its path. */
export const locateMariadb = () => locateOfMariadb('mariadbd')

/** Finds or fetches a program of MariaDB. Resolves to its path. @param {string} program */
export const locateOfMariadb = (program) =>
  locate(program, ['/usr/sbin'], fetchMariadb, 'MariaDB, or set HOLDFAST_TEST_MYSQL_URL')

/** Finds or fetches MySQL's own server, as `mysql-server`: where MariaDB is installed, `mysqld` is MariaDB. Resolves to its path. */
export const locateMysql = () =>
  locate('mysql-server', [], fetchMysql, 'a link to the `mysqld` of MySQL with this name')

/** @param {string} program @param {string[]} folders @param {() => Promise<string>} fetch @param {string} remedy */
async function locate(program, folders, fetch, remedy) {
  const found = await findProgram(program, [...folders, ...GROUPS.map(keptIn)])
  if (found) return found
  /** @type {any} */
  let cause
  const fetched = await fetch().then(
    (folder) => findProgram(program, [folder]),
    (error) => void (cause = error),
  )
  if (fetched) return fetched
  const lines = String(cause?.stderr || cause?.message || 'no usable binary was fetched').trim()
  throw new Error(`no ${program} on PATH, and fetching one failed (${lines.split('\n').at(-1)}): install ${remedy}`, {
    cause,
  })
}

/** The fetched programs, by the name of their folder. */
const GROUPS = ['postgres', 'mariadb', 'mysql-server']
/** @param {string} group */
const keptIn = (group) => join(FETCHED, group, 'bin')

/**
 * Returns a function that fetches Debian's packages, once per process, and resolves to the folder of their programs. The packages are
 * unpacked, not installed: an installation would start a server. A server finds its files by its own path, so the folders of the
 * packages stay as they are.
 *
 * `programs`: the path of each one in its package, and its last arguments. `suite`: another one than the system's, with its own C library.
 *
 * @param {string} group
 * @param {string[]} packages
 * @param {RegExp} always
 * @param {Record<string, [string, string?]>} programs
 * @param {string} [suite]
 */
function fetching(group, packages, always, programs, suite) {
  /** @type {Promise<string> | undefined} */
  let fetched
  const fetch = async () => {
    await keep(group, async (work, out) => {
      await mkdir(join(out, 'root'), { recursive: true })
      await unpackDebian(work, join(out, 'root'), packages, always, suite)
      for (const [name, [path, last = '']] of Object.entries(programs)) {
        const lines = [
          '#!/bin/sh',
          'root="${0%/bin/*}/root"',
          'libraries="$(echo "$root"/usr/lib/*-linux-*)"',
          ...(suite
            ? [`exec "$libraries"/ld-linux-*.so.* --library-path "$libraries" "$root"/${path} "$@" ${last}`.trim()]
            : [
                'LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"',
                'export LD_LIBRARY_PATH',
                `exec "$root"/${path} "$@" ${last}`.trim(),
              ]),
        ]
        await writeFile(join(out, 'bin', name), `${lines.join('\n')}\n`, { mode: 0o755 })
      }
    })
    return keptIn(group)
  }
  return () => (fetched ??= fetch())
}

const fetchPostgres = fetching(
  'postgres',
  ['postgresql', 'pgbouncer'],
  /^(postgresql(-client)?-\d+|libpq5|pgbouncer)$/,
  {
    postgres: ['usr/lib/postgresql/*/bin/postgres'],
    initdb: ['usr/lib/postgresql/*/bin/initdb'],
    pg_basebackup: ['usr/lib/postgresql/*/bin/pg_basebackup'],
    pgbouncer: ['usr/sbin/pgbouncer'],
  },
)

const fetchMariadb = fetching(
  'mariadb',
  ['mariadb-server-core', 'mariadb-client-core'],
  /^mariadb-(server|client)-core$/,
  {
    mariadbd: ['usr/sbin/mariadbd', '--basedir="$root/usr"'],
    'mariadb-install-db': ['usr/bin/mariadb-install-db', '--basedir="$root/usr"'],
    mariadb: ['usr/bin/mariadb'],
  },
)

/** Debian releases have no MySQL; its unstable suite has. */
const fetchMysql = fetching(
  'mysql-server',
  ['mysql-server-core'],
  /^mysql-server-core$/,
  { 'mysql-server': ['usr/sbin/mysqld', '--basedir="$root/usr"'] },
  'sid',
)
