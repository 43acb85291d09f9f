// Finds and fetches the programs of PostgreSQL and PgBouncer.
import { access, constants, mkdir, readdir, realpath, writeFile } from 'node:fs/promises'
import { delimiter, dirname, join } from 'node:path'
import { FETCHED, keep, unpackDebian } from './servers-cli.mjs'

/** Where Debian installs the server, which it does not put on the PATH. */
const DEBIAN = '/usr/lib/postgresql'
/** The folder of the fetched programs. */
const KEPT = join(FETCHED, 'postgres', 'bin')
/** The programs of the packages, by their place in them. */
const PROGRAMS = {
  postgres: 'usr/lib/postgresql/*/bin',
  initdb: 'usr/lib/postgresql/*/bin',
  pg_basebackup: 'usr/lib/postgresql/*/bin',
  pgbouncer: 'usr/sbin',
}

/** @param {string} path */
const isRunnable = (path) =>
  access(path, constants.X_OK).then(
    () => true,
    () => false,
  )

/** Finds or fetches the folder with `postgres` and `initdb`. */
export async function locatePostgres() {
  const versions = await readdir(DEBIAN).catch(() => [])
  const debian = versions.sort((a, b) => Number(b) - Number(a)).map((version) => join(DEBIAN, version, 'bin'))
  const folder = await locate('initdb', debian, 'PostgreSQL, or set HOLDFAST_TEST_POSTGRES_URL')
  // The other programs are beside it, or beside the file that it is a link to.
  const isComplete = await isRunnable(join(folder, 'pg_basebackup'))
  return isComplete ? folder : dirname(await realpath(join(folder, 'initdb')))
}

/** Finds or fetches `pgbouncer`, which Debian installs outside of the PATH of most users. Resolves to its path. */
export const locatePgBouncer = async () =>
  join(await locate('pgbouncer', ['/usr/sbin'], 'PgBouncer, or set HOLDFAST_TEST_PGBOUNCER_URL'), 'pgbouncer')

/** @param {string} program @param {string[]} folders @param {string} remedy */
async function locate(program, folders, remedy) {
  const search = async () => {
    for (const folder of [...(process.env.PATH ?? '').split(delimiter).filter(Boolean), ...folders, KEPT])
      if (await isRunnable(join(folder, program))) return folder
  }
  const found = await search()
  if (found) return found
  /** @type {any} */
  let cause
  await (fetching ??= fetchPostgres()).catch((error) => (cause = error))
  const fetched = await search()
  if (fetched) return fetched
  const lines = String(cause?.stderr || cause?.message || 'no usable binary was fetched').trim()
  throw new Error(`no ${program} on PATH, and fetching one failed (${lines.split('\n').at(-1)}): install ${remedy}`, {
    cause,
  })
}

// One fetch per process.
/** @type {Promise<void> | undefined} */
let fetching

// The packages are unpacked, not installed: an installation would start a server. The server finds its files by its own path, so the
// folders of the packages stay as they are.
const fetchPostgres = () =>
  keep('postgres', async (work, out) => {
    await mkdir(join(out, 'root'), { recursive: true })
    await unpackDebian(
      work,
      join(out, 'root'),
      ['postgresql', 'pgbouncer'],
      /^(postgresql(-client)?-\d+|libpq5|pgbouncer)$/,
    )
    for (const [name, folder] of Object.entries(PROGRAMS)) {
      const lines = [
        '#!/bin/sh',
        'root="${0%/bin/*}/root"',
        'libraries="$(echo "$root"/usr/lib/*-linux-*)"',
        'LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"',
        'export LD_LIBRARY_PATH',
        `exec "$root"/${folder}/${name} "$@"`,
      ]
      await writeFile(join(out, 'bin', name), `${lines.join('\n')}\n`, { mode: 0o755 })
    }
  })
