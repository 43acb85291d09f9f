// Certificates for the tests: a certificate authority in a folder, and certificates that it issues.
import { execFile } from 'node:child_process'
import { readFile, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { promisify } from 'node:util'

const run = promisify(execFile)
const FRESH = ['req', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes']
const openssl = (dir, ...args) => run('openssl', args, { cwd: dir })

/** Creates an authority in a folder. Resolves to the path of its certificate. */
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
