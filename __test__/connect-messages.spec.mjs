// The messages of connections that cannot work: what is wrong, where, why, and what to do. Each one comes in time, and is not
// retryable.
import assert from 'node:assert/strict'
import { mkdtempSync, readFileSync, rmSync } from 'node:fs'
import http from 'node:http'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { fileURLToPath } from 'node:url'
import { certify, makeAuthority } from '../scripts/certificates.mjs'
import { freePort, locateMongod, locateRedis, startMongod, startRedis } from '../scripts/servers.mjs'
import { startSentinel } from '../scripts/topologies.mjs'
import { LockService } from '../index.js'
import { Redis } from 'ioredis'
import { MongoClient } from 'mongodb'
import { canStartServer, connectWith, skip } from './stores.mjs'
import { rejects } from './tools.mjs'

const PASSWORD = 'hunter2'
const PEM = '-----BEGIN CERTIFICATE-----\nMIIB\nAQID\n-----END CERTIFICATE-----\n'

describe('arguments of connect', () => {
  const client = new Redis({ lazyConnect: true })
  after(() => client.disconnect())
  /** @type {Record<string, [args: unknown[], message: RegExp]>} */
  const cases = {
    'a host and a port without a scheme': [
      ['localhost:6379'],
      /without a scheme \(did you mean redis:\/\/HOST:PORT\?\)$/,
    ],
    'a MongoDB host and port': [['db.example:27017'], /did you mean mongodb:\/\/HOST:27017\?/],
    'a PostgreSQL host and port': [['db.example:5432'], /did you mean postgres:\/\/HOST:5432\/DATABASE\?/],
    'a list of hosts as in ZooKeeper': [
      ['one:2181,two:2181/locks'],
      /without a scheme \(did you mean zookeeper:\/\/HOST:2181,HOST:2181\?\)$/,
    ],
    'a list of hosts of Redis': [
      ['one:7000,two:7000'],
      /without a scheme \(did you mean redis\+cluster:\/\/HOST:PORT,HOST:PORT\?\)$/,
    ],
    'an endpoint of etcd with TLS': [['https://h:2379'], /the scheme of HTTP \(did you mean etcds:\/\/HOST:2379\?\)$/],
    'an endpoint of etcd': [['http://127.0.0.1:2379'], /the scheme of HTTP \(did you mean etcd:\/\/HOST:2379\?\)$/],
    'a list of URLs of etcd': [
      [['etcd://one', 'etcd://two', 'etcd://three']],
      /^target must be one URL \(etcd, ZooKeeper and MongoDB: with all hosts, scheme:\/\/h1,h2,h3\)/,
    ],
    'a MySQL host and port': [['db.example:3306'], /did you mean mysql:\/\/HOST:3306\/DATABASE\?/],
    'listenUrl for Redis': [
      ['redis://h', { listenUrl: 'redis://:secret@h' }],
      /^listenUrl must be absent for a store other than PostgreSQL/,
    ],
    'a pooler as listenUrl': [
      ['postgres://h', { listenUrl: 'postgres://u:secret@h?pooler=transaction' }],
      /^listenUrl must bypass the pooler/,
    ],
    'a name in the certificate for PostgreSQL': [
      ['postgres://h', { tls: { servername: 'x' } }],
      /^tls\.servername is for Redis: .*hostaddr/,
    ],
    'empty text': [[''], /^target must not be empty: .*HOLDFAST_URL.*got ""$/],
    'several URLs in one text': [['redis://a,redis://b,redis://c'], /must be an array.*\['redis:\/\/A', /],
    'a list of hosts': [['redis://:secret@a,b,c:6379/0'], /must have one host.*redis\+cluster:\/\/.*array of URLs/],
    'a store without a colon': [
      ['memory'],
      /^target must be a URL that starts with memory:.*a string without a scheme$/,
    ],
    'a text with a colon': [['hunter2 secret:1x'], /a string without a scheme$/],
    'a client of ioredis': [[client], /^target must be a URL or an options object, not a client/],
    'a MongoClient': [[new MongoClient('mongodb://localhost')], /not a client/],
    'PEM text that is a path': [
      ['rediss://h', { tls: { ca: '/etc/ca.pem' } }],
      /^tls\.ca must be the text of a PEM file \(-----BEGIN CERTIFICATE-----\), not its path/,
    ],
    ...Object.fromEntries(
      ['rediss://h', 'mongodb://h/?tls=true', 'postgres://h/?sslmode=verify-full', 'mysql://h/d'].flatMap((url) => [
        [
          `PEM text with escaped line breaks: ${url}`,
          [
            [url, { tls: { ca: PEM.replaceAll('\n', '\\n') } }],
            /^tls\.ca must be PEM text with line breaks: apply \.replaceAll\('\\\\n', '\\n'\), got text with escaped line breaks/,
          ],
        ],
        [
          `PEM text with spaces in place of line breaks: ${url}`,
          [
            [url, { tls: { cert: PEM.replaceAll('\n', ' ') } }],
            /^tls\.cert must be PEM text with line breaks: .*quotes.*, got text without a line break after -----BEGIN$/,
          ],
        ],
      ]),
    ),
    'PEM as text and as a file': [
      ['rediss://h', { tls: { ca: 'x', caFile: 'y' } }],
      /tls\.ca must be absent with tls\.caFile/,
    ],
    'a key without a certificate': [
      ['rediss://h', { tls: { key: 'x' } }],
      /^tls\.certFile must be set.*only tls\.key$/,
    ],
    'TLS settings without TLS': [['redis://h', { tls: { insecure: true } }], /^target must begin with rediss/],
    'host with a port': [[{ host: 'h:6379' }], /^host must be a host name.*without scheme and port/],
    'host with a scheme': [[{ host: 'redis://h' }], /^host must be a host name/],
    'host and url': [[{ host: 'h', url: 'redis://h' }], /^host must be absent with a URL/],
    'port without host': [[{ port: 6379 }], /^port must be a part of the URL, or be set together with host/],
    'a port as text': [[{ host: 'h', port: '6379' }], /^port must be a whole number from 1 to 65535, got "6379"$/],
    'a text as database, without a URL': [
      [{ host: 'h', database: 'shop' }],
      /^database must be a whole number .*form for Redis\. Other stores take a URL, such as postgres:.*got "shop"$/,
    ],
    'two logins': [['redis://u:secret@h', { password: 'p' }], /^password must be absent with a login in the URL/],
    'two logins for PostgreSQL': [
      ['postgres://u:secret@h/d', { password: () => 'p' }],
      /^password must be absent with a login in the URL/,
    ],
    'two logins for MySQL': [['mysql://u:@h/d', { password: 'p' }], /^password must be absent with a login in the URL/],
    'two user names': [
      ['redis://u@h', { username: 'u', password: 'p' }],
      /^username must be absent with a login in the URL/,
    ],
    'URLs with different user names, and a password': [
      [['redis://u@a', 'redis://u@b', 'redis://v@c'], { password: 'p' }],
      /^password must be absent with a login in the URL/,
    ],
    'credentials for a URL with a user name': [
      ['redis://u@h', { credentials: () => {} }],
      /^credentials must be absent with a login in the URL/,
    ],
    'two kinds of login': [
      ['redis://h', { password: 'p', credentials: () => {} }],
      /^credentials must be absent with password/,
    ],
    'a login without a server': [[{ password: 'p' }], /^password must be absent without a URL or a host/],
    'a login for SQLite': [
      ['sqlite:/tmp/never.sqlite', { password: 'p' }],
      /^password must be absent for a store other than/,
    ],
    'credentials for MongoDB': [
      ['mongodb://h', { credentials: async () => ({ password: 'p' }) }],
      /^credentials must be absent for a store other than Redis.*MONGODB-X509/,
    ],
    ...Object.fromEntries(
      ['mongodb://h', 'mysql://h/d', 'mariadb://u@h/d'].map((url) => [
        `a function as password for ${url}`,
        [
          [url, { password: async () => 'secret' }],
          /^password must be a string for MongoDB, MySQL, etcd and ZooKeeper: a function is for Redis and PostgreSQL, got a function$/,
        ],
      ]),
    ),
    'TLS settings for SQLite': [
      ['sqlite:/tmp/never.sqlite', { tls: { caFile: '/etc/ca.pem' } }],
      /^tls must be absent for a store other than Redis, MongoDB, PostgreSQL, MySQL, etcd and ZooKeeper, got a URL of sqlite:$/,
    ],
    'ssl of the driver pg': [['postgres://h/d?ssl=true'], /: ssl \(did you mean sslmode=require for PostgreSQL/],
    'max of the driver pg': [['postgres://h/d?max=10'], /: max \(did you mean the option maxConnections of connect/],
    'ssl of the driver mysql2': [['mysql://h/d?ssl=true'], /: ssl \(did you mean .* ssl-mode=REQUIRED for MySQL/],
    'tls of Redis': [['redis+sentinel://h/main?tls=true'], /: tls \(did you mean .* a URL with rediss:\/\/ for Redis/],
    'a Unix socket without a path': [['redis+unix://host/path.sock'], /redis\+unix:\/\/\/PATH/],
  }
  for (const [what, [args, message]] of Object.entries(cases)) {
    it(what, async () => {
      const error = await rejects(connectWith(...args), 'LOCK_INVALID_ARGUMENT', { retryable: false })
      assert.match(error.message, message)
      assert.doesNotMatch(error.message, /secret/)
    })
  }
})

it('lazy: a target that is no URL rejects the first call', async () => {
  const locks = await LockService.connect('redis://a,b', { lazy: true })
  const error = await rejects(locks.tryAcquire('n'), 'LOCK_INVALID_ARGUMENT', { retryable: false })
  assert.match(error.message, /^target must have one host/)
  await locks.close()
})

describe('a user name in the URL and the option password are one login', () => {
  for (const scheme of ['redis', 'valkey+cluster', 'redis+sentinel', 'mongodb', 'postgres', 'mysql']) {
    it(scheme, async () => {
      const url = `${scheme}://u%40v@127.0.0.1:1/0`
      await rejects(LockService.connect(url, { password: 'p', storeTimeoutMs: 500 }), 'LOCK_STORE')
    })
  }
})

describe('a path on which no retry can open a socket is a final error', { skip: process.platform === 'win32' }, () => {
  const file = fileURLToPath(import.meta.url)
  for (const url of [
    `redis+unix://${file}/sock`,
    `postgres:///app?host=${encodeURIComponent(`${file}/folder`)}`,
    `mysql://h/app?socket=${encodeURIComponent(`${file}/sock`)}`,
    `mongodb://${encodeURIComponent(`${file}/mongodb.sock`)}/app`,
  ]) {
    it(url.split(':')[0], async () => {
      const error = await rejects(LockService.connect(url, { storeTimeoutMs: 1000 }), 'LOCK_STORE', {
        retryable: false,
      })
      assert.match(error.message, /not a directory/i)
    })
  }
})

describe('a path that SQLite cannot use is named, with the reason', () => {
  const file = fileURLToPath(import.meta.url)
  /** @type {[path: string, reason: RegExp][]} */
  const paths = [
    [tmpdir(), /: it is a folder, add the name of a file \(/],
    [join(file, 'folder', 'locks.sqlite'), /its folder cannot be created: .*\(create it, or choose another path\) \(/],
  ]
  for (const [path, reason] of paths) {
    it(String(reason), async () => {
      const error = await rejects(LockService.connect(`sqlite:${path}`), 'LOCK_STORE', { retryable: false })
      assert.match(error.message, reason)
      assert.ok(error.message.endsWith(`(${path})`), error.message)
    })
  }
})

describe('options of other libraries', () => {
  let locks
  before(async () => void (locks = await LockService.connect('memory:')))
  after(() => locks.close())
  const acquire = (options) => locks.acquire('n', options)
  const connect = (options) => LockService.connect('redis://h', options)
  /** @type {[call: (options: Record<string, number>) => Promise<unknown>, option: string, meant: string][]} */
  const mistakes = [
    [acquire, 'retryCount', 'waitMs'],
    [acquire, 'retryDelay', 'waitMs'],
    [acquire, 'timeout', 'waitMs'],
    [acquire, 'acquireTimeout', 'waitMs'],
    [acquire, 'ttl', 'ttlMs'],
    [acquire, 'duration', 'ttlMs'],
    [acquire, 'expire', 'ttlMs'],
    [acquire, 'autoExtend', 'renew'],
    [connect, 'timeout', 'storeTimeoutMs'],
    [connect, 'prefix', 'keyPrefix'],
    [connect, 'db', 'database'],
    [connect, 'user', 'username'],
    [connect, 'retryCount', 'defaults.waitMs'],
    [connect, 'ttl', 'defaults.ttlMs'],
  ]
  for (const [call, option, meant] of mistakes) {
    it(`${call.name}: ${option} is ${meant}`, async () => {
      const error = await rejects(call({ [option]: 5 }), 'LOCK_INVALID_ARGUMENT')
      assert.ok(error.message.includes(`(did you mean ${meant}?), got "${option}"`), error.message)
    })
  }
})

describe('servers that the URL does not fit', () => {
  const dir = mkdtempSync(join(tmpdir(), 'holdfast-messages-'))
  const started = []
  /** The port of each server that could be started. @type {Record<string, any>} */
  const at = {}
  /** @type {string | undefined} */
  let unable
  /** @type {string | undefined} */
  let noTls
  const add = (name, server, port = server.port) => {
    started.push(server)
    at[name] = port
  }

  before(async () => {
    const can = { skip: (reason) => (unable = reason) }
    if (!(await canStartServer(can, 'redis', locateRedis))) return
    const hasMongod = await locateMongod().then(
      () => true,
      () => false,
    )
    const authority = await makeAuthority(dir).catch((error) => error)
    noTls = authority instanceof Error ? `no openssl: ${authority.message}` : undefined
    const server = noTls ? undefined : await certify(dir, 'server', { hosts: 'DNS:lock.example' })
    const tlsPort = String(await freePort())
    const tlsSettings = server && {
      'tls-port': tlsPort,
      'tls-cert-file': server.cert,
      'tls-key-file': server.key,
      'tls-ca-cert-file': authority,
      'tls-auth-clients': 'no',
    }
    const tlsArgs = Object.entries(tlsSettings ?? {}).flatMap(([name, value]) => [`--${name}`, value])
    await Promise.all(
      Object.entries({
        plain: startRedis(),
        secured: startRedis({ args: ['--requirepass', PASSWORD] }),
        cluster: startRedis({ args: ['--cluster-enabled', 'yes'] }),
        tls: tlsSettings && startRedis({ args: tlsArgs }).catch(() => (noTls = 'this Redis has no TLS')),
        mongodb: hasMongod && startMongod(),
        'mongodb with TLS':
          server &&
          hasMongod &&
          startMongod({
            args: ['--tlsMode', 'requireTLS', '--tlsCertificateKeyFile', server.both, '--tlsCAFile', authority],
          }),
      }).map(async ([name, starting]) => {
        const server = await starting
        if (typeof server === 'object') add(name, server, server.port)
      }),
    )
    if (at.tls) at.tls = Number(tlsPort)
    add('sentinel', await startSentinel(at.plain))
    add('sentinel with a login', await startSentinel(at.plain, [`requirepass ${PASSWORD}`]))
    if (at.tls && tlsSettings) {
      const port = String(await freePort())
      const settings = Object.entries({ ...tlsSettings, 'tls-port': port, 'tls-replication': 'yes' })
      const lines = settings.map(([name, value]) => `${name} ${value}`)
      add('sentinel with TLS', await startSentinel(Number(tlsPort), lines), port)
    }
    const web = http.createServer((_, response) => response.end()).listen(0, '127.0.0.1')
    await new Promise((resolve) => web.once('listening', resolve))
    const { port } = /** @type {import('node:net').AddressInfo} */ (web.address())
    add('http', { stop: () => web.close() }, port)
  })
  after(async () => {
    await Promise.all(started.map((server) => server.stop()))
    rmSync(dir, { recursive: true, force: true })
  })

  const ca = () => ({ tls: { caFile: join(dir, 'ca.crt') } })
  // The URL has PORT in the place of the port.
  /** @type {[server: string, url: string, message: RegExp, options?: () => import('../index.js').ConnectOptions][]} */
  const mismatches = [
    ['tls', 'redis://127.0.0.1:PORT', /127\.0\.0\.1:\d+ expects TLS: begin the URL with rediss/],
    ['plain', 'rediss://127.0.0.1:PORT', /is a Redis server without TLS: begin the URL with redis instead of rediss/],
    ['tls', 'rediss://127.0.0.1:PORT', /authority that is not trusted here: set tls\.caFile or tls\.ca/],
    ['tls', 'rediss://127.0.0.1:PORT', /for another host name.*set tls\.servername/, ca],
    ['sentinel', 'redis://127.0.0.1:PORT', /is a Redis Sentinel.*redis\+sentinel:\/\/HOST:PORT\/MASTER/],
    ['cluster', 'redis://127.0.0.1:PORT', /is a node of a Redis Cluster.*redis\+cluster:\/\/HOST:PORT/],
    ['plain', 'redis+cluster://127.0.0.1:PORT', /is not a node of a Redis Cluster: use redis:\/\/HOST:PORT/],
    ['plain', 'redis+sentinel://127.0.0.1:PORT/main', /is no Redis Sentinel.*use redis:\/\/HOST:PORT/],
    ['secured', 'redis://127.0.0.1:PORT', /NOAUTH.*requires a login.*options username and password/],
    ['secured', 'redis://:wrong@127.0.0.1:PORT', /WRONGPASS.*check the user name and the password.*percent-encoded/],
    ['plain', 'redis://127.0.0.1:PORT/99', /DB index is out of range.*does not have the database/],
    ['http', 'redis://127.0.0.1:PORT', /is an HTTP server, not Redis: check the host and the port/],
    ['http', 'rediss://127.0.0.1:PORT', /is an HTTP server, not Redis/],
    ['mongodb', 'redis://127.0.0.1:PORT', /is a MongoDB server, not Redis: begin the URL with mongodb:\/\//],
    [
      'sentinel with a login',
      'redis+sentinel://:hunter2@127.0.0.1:PORT/main',
      /NOAUTH.*this sentinel requires a login of its own: add \?sentinelPassword=/,
    ],
    [
      'sentinel with a login',
      'redis+sentinel://127.0.0.1:PORT/main?sentinelPassword=wrong',
      /refuses the login \(check sentinelUsername and sentinelPassword in the URL/,
    ],
    ['plain', 'mongodb://127.0.0.1:PORT', /\(it is a Redis server: begin the URL with redis:\/\/, or check the port\)/],
    ['secured', 'mongodb://127.0.0.1:PORT/db?replicaSet=rs0', /it is a Redis server: begin the URL with redis:/],
    ['plain', 'mongodb://127.0.0.1:PORT/?tls=true', /it is a Redis server: begin|does not speak TLS: omit tls=true/],
    ['tls', 'mongodb://127.0.0.1:PORT', /speaks nothing but TLS: set tls=true in the URL, or the option tls/],
    ['http', 'mongodb://127.0.0.1:PORT', /is not MongoDB: check the host and the port/],
    ['http', 'mongodb://127.0.0.1:PORT/?tls=true', /does not speak TLS: omit tls=true/],
    ['mongodb', 'mongodb://127.0.0.1:PORT/?tls=true', /does not speak TLS: omit tls=true and the option tls/],
    ['mongodb with TLS', 'mongodb://127.0.0.1:PORT', /speaks nothing but TLS: set tls=true in the URL/],
  ]
  for (const [server, url, message, options] of mismatches) {
    it(`${url.split(':')[0]} at ${server}: ${message.source}`, async (t) => {
      if (unable) return skip(t, unable)
      if (!at[server]) return skip(t, `no server of the kind ${server} can be started here${noTls ? `: ${noTls}` : ''}`)
      // The machine may stand still for a moment: the fastest of some attempts counts.
      let fastest = Infinity
      for (let attempt = 0; attempt < 5 && fastest >= 1000; attempt++) {
        const startedAt = performance.now()
        const call = LockService.connect(url.replace('PORT', at[server]), options?.())
        const error = await rejects(call, 'LOCK_STORE')
        const tookMs = performance.now() - startedAt
        fastest = Math.min(fastest, tookMs)
        assert.doesNotMatch(error.message, /ResponseError|ErrorKind|\{|wrong@|hunter2/, 'no names of Rust, no password')
        // A slow one may have reached a limit before the cause was known.
        if (tookMs >= 1000) continue
        assert.equal(error.retryable, false, error.message)
        assert.match(error.message, message)
        assert.match(error.message, /: connect failed: /)
      }
      assert.ok(fastest < 1000, `${fastest} ms`)
    })
  }

  it('tls.servername is the name in the certificate, PEM may be text', async (t) => {
    if (!at.tls) return skip(t, unable ?? noTls)
    const text = { ca: readFileSync(join(dir, 'ca.crt'), 'utf8'), servername: 'lock.example' }
    // As YAML has it.
    const indented = { ...text, ca: text.ca.replace(/^/gm, '\t  ').replaceAll('\n', ' \r\n') }
    for (const target of [
      [`rediss://127.0.0.1:${at.tls}`, { tls: indented }],
      [`rediss://127.0.0.1:${at.tls}`, { tls: text }],
      [{ host: '127.0.0.1', port: at.tls, tls: text }],
    ]) {
      const locks = await connectWith(...target)
      assert.equal(await locks.using('n', (lock) => lock.isHeld), true)
      await locks.close()
    }
  })

  it('tls.servername is the name in the certificate of the sentinels, too', async (t) => {
    if (!at.tls) return skip(t, unable ?? noTls)
    const url = `rediss+sentinel://127.0.0.1:${at['sentinel with TLS']}/main`
    const locks = await LockService.connect(url, { tls: { caFile: join(dir, 'ca.crt'), servername: 'lock.example' } })
    assert.equal(await locks.using('n', (lock) => lock.isHeld), true)
    await locks.close()
    const error = await rejects(LockService.connect(url, ca()), 'LOCK_STORE', { retryable: false })
    assert.match(error.message, /for another host name.*set tls\.servername/)
  })
})
