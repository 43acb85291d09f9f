// Starts etcd servers for the tests and the benchmark. `etcd` is that of the PATH, or that of Debian 13.
import { execFile } from 'node:child_process'
import { copyFile, stat } from 'node:fs/promises'
import { dirname, join } from 'node:path'
import { promisify } from 'node:util'
import { FETCHED, keep, locate, unpackDebian } from './servers-cli.mjs'
import { freePort, startServer } from './servers.mjs'

/** Finds or fetches `etcd`. Resolves to its path. */
export const locateEtcd = () => locate('etcd', fetchEtcd, 'etcd, or set HOLDFAST_TEST_ETCD_URL.')

// It needs the C library only. Debian 12 has 3.4.
const fetchEtcd = () =>
  keep('etcd', async (work, out) => {
    const programs = ['etcd', 'etcdctl']
    await unpackDebian(work, join(work, 'root'), ['etcd-server', 'etcd-client'], /^etcd-(server|client)$/, 'trixie')
    for (const name of programs) await copyFile(join(work, 'root/usr/bin', name), join(out, 'bin', name))
  })

/**
 * Runs `etcdctl`, which is beside `etcd`. Resolves to its output.
 *
 * @param {{ port: number | string }} server
 * @param {string[]} args
 */
export async function etcdctl({ port }, ...args) {
  const path = await locateEtcdctl()
  const env = { ...process.env, ETCDCTL_API: '3' }
  const { stdout } = await promisify(execFile)(path, ['--endpoints', `127.0.0.1:${port}`, ...args], { env })
  return stdout
}

/** Returns the path of `etcdctl`. */
export async function locateEtcdctl() {
  const path = await locateEtcd()
  const beside = join(dirname(path), 'etcdctl')
  const isBeside = await stat(beside).then(
    () => true,
    () => false,
  )
  return isBeside ? beside : join(FETCHED, 'etcd/bin/etcdctl')
}

/**
 * Starts a server. `args`: more arguments. `tls`: paths of its certificate and its key, and of the authority of clients.
 *
 * @param {{ args?: string[], tls?: { cert: string, key: string, ca?: string } }} [options]
 */
export async function startEtcd({ args = [], tls } = {}) {
  const [server] = await startMembers([{ peer: await freePort() }], args, tls)
  return server
}

/**
 * Starts a cluster. Resolves to its members. `peers`: for each member its port for the others, and the port by which they reach it, if
 * that is a proxy.
 *
 * @param {{ peer: number, advertised?: number }[]} peers
 * @param {string[]} [args]
 * @param {{ cert: string, key: string, ca?: string }} [tls]
 */
export async function startMembers(peers, args = [], tls = undefined) {
  const path = await locateEtcd()
  const scheme = tls ? 'https' : 'http'
  /** @param {{ peer: number, advertised?: number }} member */
  const reached = ({ peer, advertised = peer }) => `http://127.0.0.1:${advertised}`
  const cluster = peers.map((member, index) => `m${index}=${reached(member)}`).join()
  const secure = tls ? ['--cert-file', tls.cert, '--key-file', tls.key] : []
  if (tls?.ca) secure.push('--client-cert-auth', '--trusted-ca-file', tls.ca)
  return Promise.all(
    peers.map((member, index) =>
      startServer((dir, port) => {
        const client = `${scheme}://127.0.0.1:${port}`
        const peer = [
          '--listen-peer-urls',
          `http://127.0.0.1:${member.peer}`,
          '--initial-advertise-peer-urls',
          reached(member),
        ]
        const listen = ['--listen-client-urls', client, '--advertise-client-urls', client]
        const name = ['--name', `m${index}`, '--initial-cluster', cluster, '--data-dir', join(dir, 'data')]
        return {
          argv: [path, ...name, ...listen, ...peer, ...secure, '--log-outputs', 'stderr', ...args],
          ready: async (log) => /ready to serve client requests/.test(log),
          properties: { url: `${tls ? 'etcds' : 'etcd'}://127.0.0.1:${port}` },
        }
      }),
    ),
  )
}
