// Certificates for the tests: a certificate authority in a folder, and certificates that it issues.
import { execFile } from 'node:child_process'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { promisify } from 'node:util'

const run = promisify(execFile)
const FRESH = ['req', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes']
/** @param {string} dir @param {string[]} args */
const openssl = (dir, ...args) => run('openssl', args, { cwd: dir })

/**
 * Creates an authority in a folder. Resolves to the path of its certificate.
 *
 * @param {string} dir
 */
export async function makeAuthority(dir) {
  await openssl(
    dir,
    ...FRESH,
    '-x509',
    '-days',
    '2',
    '-subj',
    '/CN=holdfast test CA',
    '-keyout',
    'ca.key',
    '-out',
    'ca.crt',
  )
  return join(dir, 'ca.crt')
}

/**
 * Issues a certificate of a folder's authority, by default for a server with these host names. Resolves to the paths of the
 * certificate, the key, and a file with both.
 *
 * @param {string} dir
 * @param {string} name
 */
export async function certify(dir, name, { hosts = 'DNS:localhost,IP:127.0.0.1', usage = 'serverAuth' } = {}) {
  const [key, cert, both] = ['key', 'crt', 'pem'].map((kind) => join(dir, `${name}.${kind}`))
  await openssl(dir, ...FRESH, '-subj', `/O=${name}/CN=${name}`, '-keyout', key, '-out', `${name}.csr`)
  // rustls checks these names only, and ignores the subject.
  await writeFile(join(dir, `${name}.ext`), `subjectAltName=${hosts}\nextendedKeyUsage=${usage}\n`)
  const signing = ['-CA', 'ca.crt', '-CAkey', 'ca.key', '-CAcreateserial', '-extfile', `${name}.ext`]
  await openssl(dir, 'x509', '-req', '-days', '2', '-in', `${name}.csr`, ...signing, '-out', cert)
  await writeFile(both, (await readFile(cert, 'utf8')) + (await readFile(key, 'utf8')), { mode: 0o600 })
  return { cert, key, both }
}

/**
 * Creates a folder with an authority and a server's certificate. `caFile` is the path for clients, `settings(port)`
 * are those of a Redis server or sentinel that listens with TLS on this port, too, and `remove()` removes the folder.
 *
 * @typedef {Awaited<ReturnType<typeof redisTls>>} RedisTls
 */
export async function redisTls() {
  const dir = await mkdtemp(join(tmpdir(), 'holdfast-tls-'))
  const caFile = await makeAuthority(dir)
  // Servers connect to each other with the same certificate.
  const { cert, key } = await certify(dir, 'server', { usage: 'serverAuth,clientAuth' })
  /** @param {number} port */
  const settings = (port) => [
    ['tls-port', String(port)],
    ['tls-cert-file', cert],
    ['tls-key-file', key],
    ['tls-ca-cert-file', caFile],
    ['tls-auth-clients', 'no'],
  ]
  return { caFile, settings, remove: () => rm(dir, { recursive: true, force: true }) }
}
