// Finds, fetches and starts ZooKeeper servers for the tests and the benchmark.
import { mkdir, writeFile } from 'node:fs/promises'
import net from 'node:net'
import { join } from 'node:path'
import { findProgram } from './programs.mjs'
import { FETCHED, keep, unpackDebian } from './servers-cli.mjs'
import { freePort, startServer } from './servers.mjs'

/**
 * The programs: the packages of Debian that have them, their jars, and the main class that they run first. They are unpacked, not
 * installed: an installation might start a server. A Java that is missing is fetched, too.
 */
const PROGRAMS = {
  'zookeeper-server': {
    packages: ['libzookeeper-java'],
    jars: 'jackson-annotations jackson-core jackson-databind commons-io',
    main: 'org.apache.zookeeper.server.quorum.QuorumPeerMain',
  },
  'zookeeper-curator': {
    packages: ['libcurator-recipes-java'],
    jars: 'curator-client curator-framework curator-recipes guava',
    main: '',
  },
}
const JARS =
  'zookeeper zookeeper-jute slf4j-api slf4j-simple commons-cli metrics-core snappy-java ' +
  'netty-common netty-buffer netty-transport netty-handler netty-codec netty-resolver netty-transport-native-unix-common netty-transport-native-epoll'

/**
 * Finds or fetches `zookeeper-server`: a program that takes the path of a configuration, or `--cli` and the arguments of `zkCli.sh`.
 * Resolves to its path.
 */
export const locateZookeeper = () => locate('zookeeper-server', 'set HOLDFAST_TEST_ZOOKEEPER_URL')

/** Finds or fetches `zookeeper-curator`: a Java with the jars of Curator, which takes the path of a source file. Resolves to its path. */
export const locateCurator = () => locate('zookeeper-curator', 'install libcurator-recipes-java')

/** @type {Map<string, Promise<void>>} */
const fetching = new Map()

/** @param {keyof typeof PROGRAMS} program @param {string} remedy */
async function locate(program, remedy) {
  const kept = join(FETCHED, program, 'bin')
  const found = await findProgram(program, [kept])
  if (found) return found
  const fetched = fetching.get(program) ?? fetch(program)
  fetching.set(program, fetched)
  /** @type {any} */
  let cause
  await fetched.catch((error) => (cause = error))
  const path = await findProgram(program, [kept])
  if (path) return path
  const lines = String(cause?.stderr || cause?.message || 'no usable program was fetched').trim()
  throw new Error(`no ${program} on PATH, and fetching one failed (${lines.split('\n').at(-1)}): ${remedy}`, { cause })
}

/** @param {keyof typeof PROGRAMS} program */
function fetch(program) {
  const { packages, jars, main } = PROGRAMS[program]
  return keep(program, async (work, out) => {
    await mkdir(join(out, 'root'), { recursive: true })
    const java = (await findProgram('java', [])) ? [] : ['default-jdk-headless']
    await unpackDebian(work, join(out, 'root'), [...packages, ...java], /^lib(zookeeper|curator-\w+)-java$/)
    const classes = `${JARS} ${jars}`
      .split(' ')
      .map((name) => `$root/usr/share/java/${name}.jar:/usr/share/java/${name}.jar`)
    const lines = [
      '#!/bin/sh',
      'root="${0%/bin/*}/root"',
      'java="$(ls "$root"/usr/lib/jvm/java-*/bin/java 2>/dev/null | head -n 1)"',
      '[ -x "$java" ] || java=java',
      `classes="${classes.join(':')}"`,
      'if [ "$1" = --version ]; then exec "$java" -cp "$classes" org.apache.zookeeper.version.VersionInfoMain; fi',
      'if [ "$1" = --cli ]; then shift; exec "$java" -cp "$classes" org.apache.zookeeper.ZooKeeperMain "$@"; fi',
      `exec "$java" $JAVA_OPTIONS -cp "$classes" ${main} "$@"`,
    ]
    await writeFile(join(out, 'bin', program), `${lines.join('\n')}\n`, { mode: 0o755 })
  })
}

/** A small server that starts fast, removes empty containers soon, and does not wait for the disk. */
const OPTIONS = [
  '-Xmx160m',
  '-XX:+UseSerialGC',
  '-XX:TieredStopAtLevel=1',
  '-Dzookeeper.admin.enableServer=false',
  '-Dznode.container.checkIntervalMs=500',
  '-Dzookeeper.forceSync=no',
]

/**
 * Starts a server, or with `member` one of an ensemble: its number, and the lines `server.N=…` of all. `options`: of Java. `tls`: paths of
 * a file with its certificate and its key, and of the authority of clients, without which it requires no certificate of them. Its port for
 * TLS is `tlsPort`.
 *
 * @typedef {{ both: string, ca?: string }} Tls
 * @typedef {{ settings?: Record<string, string | number>, options?: string[], member?: { id: number, servers: string[] }, tls?: Tls }} ZookeeperOptions
 * @param {ZookeeperOptions} [options]
 */
export async function startZookeeper({ settings = {}, options = [], member, tls } = {}) {
  const path = await locateZookeeper()
  return startServer(async (dir, port) => {
    const tlsPort = tls ? await freePort() : 0
    const data = join(dir, 'data')
    await mkdir(data)
    if (member) await writeFile(join(data, 'myid'), `${member.id}\n`)
    const all = {
      dataDir: data,
      clientPortAddress: '127.0.0.1',
      clientPort: port,
      // A quarter of the shortest session timeout of the tests.
      tickTime: 1000,
      initLimit: 10,
      syncLimit: 5,
      maxClientCnxns: 0,
      '4lw.commands.whitelist': '*',
      ...(tls && {
        secureClientPort: tlsPort,
        secureClientPortAddress: '127.0.0.1',
        'ssl.keyStore.location': tls.both,
        'ssl.keyStore.type': 'PEM',
        'ssl.trustStore.location': tls.ca ?? tls.both,
        'ssl.trustStore.type': 'PEM',
        'ssl.clientAuth': tls.ca ? 'need' : 'none',
      }),
      ...settings,
    }
    const lines = Object.entries(all).map(([name, value]) => `${name}=${value}`)
    await writeFile(join(dir, 'zoo.cfg'), `${[...lines, ...(member?.servers ?? [])].join('\n')}\n`)
    const netty = tls ? ['-Dzookeeper.serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory'] : []
    const java = [...OPTIONS, ...netty, ...options].join(' ')
    return {
      argv: ['/usr/bin/env', `JAVA_OPTIONS=${java}`, path, join(dir, 'zoo.cfg')],
      ready: async () => member !== undefined || (await modeOf(port)) !== undefined,
      properties: { url: `zookeeper://127.0.0.1:${port}`, tlsPort },
    }
  })
}

/**
 * Starts an ensemble of three servers. `settings` and `options` are those of each. `address(from, to, port)` replaces each of
 * the two ports at which server `from` reaches server `to`, to have a proxy between them: that of a leader, and that of elections.
 *
 * @param {ZookeeperOptions & { address?: (from: number, to: number, port: number) => number | Promise<number> }} [options]
 */
export async function startZookeepers({ settings, options = [], address = (_from, _to, port) => port } = {}) {
  const ids = [1, 2, 3]
  const ports = await Promise.all(ids.map(async () => ({ quorum: await freePort(), election: await freePort() })))
  const started = ids.map(async (id) => {
    const servers = ids.map(async (of) => {
      const { quorum, election } = ports[of - 1]
      const [data, votes] =
        of === id ? [quorum, election] : await Promise.all([quorum, election].map((port) => address(id, of, port)))
      return `server.${of}=127.0.0.1:${data}:${votes}`
    })
    // Otherwise a vote that was lost is repeated after up to a minute.
    const java = ['-Dzookeeper.fastleader.maxNotificationInterval=500', ...options]
    return startZookeeper({
      settings: { tickTime: 2000, ...settings },
      options: java,
      member: { id, servers: await Promise.all(servers) },
    })
  })
  const members = await Promise.all(started)
  const stop = async () => void (await Promise.all(members.map((member) => member.stop())))
  const deadline = Date.now() + 60_000
  while (!(await Promise.all(members.map(({ port }) => modeOf(port)))).includes('leader')) {
    if (Date.now() > deadline) {
      await stop()
      throw new Error('the three servers have elected no leader')
    }
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
  const hosts = members.map(({ port }) => `127.0.0.1:${port}`)
  return { members, url: `zookeeper://${hosts.join()}`, stop }
}

/** Resolves to what a server is: `standalone`, `leader` or `follower`. `undefined`: it serves no clients. @param {string | number} port */
export async function modeOf(port) {
  const reply = await ask(port, 'srvr').catch(() => '')
  return /^Mode: (\w+)$/m.exec(reply)?.[1]
}

/** Sends a command of four letters. Resolves to the reply. @param {string | number} port @param {string} command */
export function ask(port, command) {
  return new Promise((/** @type {(reply: string) => void} */ resolve, reject) => {
    let reply = ''
    const socket = net.connect(Number(port), '127.0.0.1', () => socket.write(command))
    socket.setTimeout(2000, () => socket.destroy(new Error('no reply')))
    socket
      .on('data', (data) => (reply += data))
      .on('error', reject)
      .on('close', () => resolve(reply))
  })
}
