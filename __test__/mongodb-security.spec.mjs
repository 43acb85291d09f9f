// MongoDB: valid and invalid logins, TLS settings and URLs on real servers.
import assert from 'node:assert/strict'
import net from 'node:net'
import { it } from 'node:test'
import { LockService } from '../index.js'
import { certify, makeAuthority } from '../scripts/certificates.mjs'
import { SECRET, urlOf, assertConnectFails, withMongod } from './mongodb/fixture.mjs'
import { assertFree, rejects, until, waiting } from './tools.mjs'

/** Asserts that a name passes from one service to another. */
async function locksWork(fixture, url, options) {
  const [one, two] = [await fixture.connect(url, options), await fixture.connect(url, options)]
  const lock = await one.acquire('n')
  const next = two.acquire('n', { waitMs: 60_000 })
  await waiting(two, 1)
  assert.equal(await lock.release(), true)
  assert.equal(await (await next).release(), true)
  return one
}

/** Starts a TCP server that calls `serve` with each connection. Returns its address. */
async function peer(fixture, serve) {
  const sockets = new Set()
  const server = net.createServer((socket) => {
    sockets.add(socket)
    socket.on('error', () => {}).on('close', () => sockets.delete(socket))
    serve(socket)
  })
  await /** @type {Promise<void>} */ (new Promise((resolve) => server.listen(0, '127.0.0.1', resolve)))
  fixture.onClose(() => {
    for (const socket of sockets) socket.destroy()
    return new Promise((resolve) => server.close(resolve))
  })
  return /** @type {net.AddressInfo} */ (server.address())
}

withMongod('a failed login is reported as such', async (fixture) => {
  const server = await fixture.startWithAuth()
  const admin = server.admin.db('admin')
  await server.admin.db('shop').command({ createUser: 'app', pwd: `${SECRET}-app`, roles: ['readWrite'] })
  const rights = [{ role: 'readWrite', db: 'shop' }]
  await admin.command({ createUser: 'ops', pwd: `${SECRET}/@:ops`, roles: rights })
  await admin.command({ createUser: 'old', pwd: `${SECRET}-old`, roles: rights, mechanisms: ['SCRAM-SHA-1'] })

  // The database of a user: the one in the path, by default admin, or authSource.
  const app = `app:${SECRET}-app`
  const ops = `ops:${encodeURIComponent(`${SECRET}/@:ops`)}`
  await locksWork(fixture, urlOf(server, { login: app, path: 'shop' }))
  await locksWork(fixture, urlOf(server, { login: ops, path: 'shop', options: 'authSource=admin' }))
  await locksWork(
    fixture,
    urlOf(server, { login: app, path: 'shop', options: 'authSource=shop&authMechanism=SCRAM-SHA-256' }),
  )
  const without = (source) => new RegExp(`cannot log in as user "\\w+" of the database "${source}" \\(authSource\\)`)
  /** @type {[string, RegExp][]} */
  const refused = [
    [urlOf(server, { login: `app:${SECRET}`, path: 'shop' }), without('shop')],
    [urlOf(server, { login: `nobody:${SECRET}`, path: 'shop' }), without('shop')],
    [urlOf(server, { login: app, path: 'shop', options: 'authSource=admin' }), without('admin')],
    [urlOf(server, { login: ops, path: 'shop' }), without('shop')],
    [urlOf(server, { login: app }), without('admin')],
    [urlOf(server, { login: `old:${SECRET}-old`, options: 'authMechanism=SCRAM-SHA-256' }), without('admin')],
    [
      urlOf(server, { path: 'shop' }),
      /the server requires a login, and the URL names no user: .*requires authentication/,
    ],
    // Users of admin are found by default, but have no right to the default database.
    [urlOf(server, { login: ops }), /the user has not the right to do this: not authorized on test/],
  ]
  for (const [url, why] of refused) {
    await assertConnectFails(url, { retryable: false, why })
  }
})

withMongod('a password that is changed while the service runs is reported', async (fixture) => {
  const server = await fixture.startWithAuth()
  const shop = server.admin.db('shop')
  await shop.command({ createUser: 'app', pwd: `${SECRET}-1`, roles: ['readWrite'] })
  const service = await fixture.connect(urlOf(server, { login: `app:${SECRET}-1`, path: 'shop' }))
  await shop.command({ updateUser: 'app', pwd: `${SECRET}-2` })
  await server.restart()
  // The first errors may be those of broken connections.
  const error = await until('the refusal', () =>
    service.tryAcquire('n').then(
      () => assert.fail('granted'),
      (thrown) => (thrown.retryable ? undefined : thrown),
    ),
  )
  assert.match(error.message, /wrong user, password or authSource: .*Authentication failed/)
  assert.doesNotMatch(error.message, new RegExp(SECRET))
})

withMongod('a URL with the wrong replica set is rejected, and a URL without one works', async (fixture) => {
  const [standalone, set] = [await fixture.start(), await fixture.start({ replicaSet: true })]
  await assertConnectFails(urlOf(standalone, { options: 'replicaSet=rs0' }), {
    retryable: false,
    why: /127\.0\.0\.1:\d+ \(it belongs to no replica set, and the URL asks for the replica set "rs0"\)/,
  })
  const other = /\(it belongs to the replica set "rs0", and the URL asks for the replica set "rs9"\)/
  await assertConnectFails(urlOf(set, { options: 'replicaSet=rs9' }), { retryable: false, why: other })
  await assertConnectFails(urlOf(set, { options: 'replicaSet=rs9&directConnection=true' }), {
    retryable: false,
    why: other,
  })
  // Without a set's name, and with a direct connection; change streams work in each case.
  for (const options of ['', 'directConnection=true', 'replicaSet=rs0', 'directConnection=true&replicaSet=rs0']) {
    await locksWork(fixture, urlOf(set, { options }))
  }
  await locksWork(fixture, urlOf(standalone, { options: 'directConnection=true' }))
})

withMongod('a waiter opens a change stream with directConnection', async (fixture) => {
  const set = await fixture.start({ replicaSet: true })
  const service = await fixture.connect(urlOf(set, { options: 'directConnection=true' }))
  const holder = await fixture.connect(urlOf(set))
  const lock = await holder.acquire('n')
  const next = service.acquire('n', { waitMs: 60_000 })
  await waiting(service, 1)
  const admin = (await fixture.client(set, '', '')).db('admin')
  await until('a change stream at the server', async () => {
    const operations = await admin.aggregate([{ $currentOp: { allUsers: true, idleCursors: true } }]).toArray()
    return operations.some((operation) => JSON.stringify(operation.cursor ?? {}).includes('$changeStream'))
  })
  await lock.release()
  assert.equal(await (await next).release(), true)
})

withMongod('connect to a secondary, and to a member without a set, is retryable', async (fixture) => {
  const member = await fixture.start({ args: ['--replSet', 'rs0', '--oplogSize', '128'] })
  await assertConnectFails(urlOf(member, { options: 'replicaSet=rs0' }), {
    retryable: true,
    why: /127\.0\.0\.1:\d+ \(/,
  })
  const admin = (await fixture.client(member, '', '')).db('admin')
  const self = { _id: 0, host: `127.0.0.1:${member.port}` }
  await admin.command({ replSetInitiate: { _id: 'rs0', members: [self] } })
  await until('a primary', async () => (await admin.command({ hello: 1 })).isWritablePrimary)
  const service = await locksWork(fixture, urlOf(member, { options: 'replicaSet=rs0' }))
  await admin.command({ replSetStepDown: 60, secondaryCatchUpPeriodSecs: 0, force: true })
  await assertConnectFails(urlOf(member, { options: 'directConnection=true' }), {
    retryable: true,
    why: /directConnection=true leads to 127\.0\.0\.1:\d+, which is not the primary of the replica set "rs0"/,
  })
  await assertConnectFails(urlOf(member, { options: 'replicaSet=rs0' }), {
    retryable: true,
    why: /no server is the primary: 127\.0\.0\.1:\d+ \(a secondary\)/,
  })
  await admin.command({ replSetFreeze: 0 })
  await until('the service works again', () => service.using('n', () => true).catch(() => false), 60_000)
})

withMongod('the host names of a set may differ from those in the URL', async (fixture) => {
  const member = await fixture.start({ args: ['--replSet', 'rs0', '--oplogSize', '128'] })
  const admin = (await fixture.client(member, '', '')).db('admin')
  await admin.command({ replSetInitiate: { _id: 'rs0', members: [{ _id: 0, host: `localhost:${member.port}` }] } })
  await until('a primary', async () => (await admin.command({ hello: 1 })).isWritablePrimary)
  await locksWork(fixture, urlOf(member))
  await locksWork(fixture, urlOf(member, { options: 'directConnection=true' }))
})

withMongod('connect to a server that is not MongoDB, or does not answer', async (fixture) => {
  const silent = await peer(fixture, (socket) => socket.resume())
  await assertConnectFails(urlOf(silent), {
    retryable: true,
    why: /no server can be reached: 127\.0\.0\.1:\d+ \(it does not answer/,
  })
  const closing = await peer(fixture, (socket) => socket.once('data', () => socket.end()))
  await assertConnectFails(urlOf(closing), { retryable: true, why: /ended the connection without an answer|reset/ })
  const http = await peer(fixture, (socket) =>
    socket.once('data', () => socket.write('HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n')),
  )
  const noMongodb = /127\.0\.0\.1:\d+ \(what answers there is not MongoDB/
  await assertConnectFails(urlOf(http), { retryable: false, why: noMongodb })
  const login = `app:${SECRET}@`
  await assertConnectFails(`mongodb://${login}127.0.0.1:${http.port}/shop`, { retryable: false, why: noMongodb })
  await assertConnectFails(urlOf(http, { options: 'tls=true' }), { retryable: false, why: /it does not speak TLS/ })
  // One of the two servers may recover: retryable.
  const pair = `mongodb://127.0.0.1:${http.port},127.0.0.1:${silent.port}/`
  await assertConnectFails(pair, { retryable: true, why: /not MongoDB.*does not answer|does not answer.*not MongoDB/ })
  await assertConnectFails('mongodb://127.0.0.1:1/', {
    retryable: true,
    why: /no server can be reached: 127\.0\.0\.1:1 \(.*refused/,
  })
  await assertConnectFails('mongodb://nowhere.invalid/', {
    retryable: true,
    why: /nowhere\.invalid:27017 \(its name cannot be resolved/,
  })
  await assertConnectFails(`mongodb+srv://app:${SECRET}@nowhere.example.invalid/shop`, {
    retryable: true,
    why: /the servers of mongodb\+srv:\/\/nowhere\.example\.invalid cannot be resolved|mongodb\+srv:\/\/nowhere\.example\.invalid/,
  })

  const paused = await fixture.start()
  const service = await locksWork(fixture, urlOf(paused))
  await paused.pause()
  await assertConnectFails(urlOf(paused), { retryable: true, why: /it does not answer/ })
  paused.resume()
  await assertFree(service, 'n')
})

async function authorities(fixture) {
  const [dir, other] = [fixture.folder(), fixture.folder()]
  const [ca, stranger] = [await makeAuthority(dir), await makeAuthority(other)]
  const usage = 'clientAuth'
  return {
    ca,
    stranger,
    server: await certify(dir, 'server'),
    elsewhere: await certify(dir, 'elsewhere', { hosts: 'DNS:elsewhere.example' }),
    client: await certify(dir, 'client', { usage }),
    forged: await certify(other, 'client', { usage }),
  }
}

const requireTls = (identity, ca, ...more) => [
  '--tlsMode',
  'requireTLS',
  '--tlsCertificateKeyFile',
  identity.both,
  '--tlsCAFile',
  ca,
  ...more,
]
const ANONYMOUS = '--tlsAllowConnectionsWithoutCertificates'

withMongod('TLS accepts servers of the trusted authority only', async (fixture) => {
  const { ca, stranger, server: identity, elsewhere } = await authorities(fixture)
  const server = await fixture.start({ args: requireTls(identity, ca, ANONYMOUS) })
  await locksWork(fixture, urlOf(server), { tls: { caFile: ca } })
  await locksWork(fixture, urlOf(server, { host: 'localhost' }), { tls: { caFile: ca } })
  await locksWork(fixture, urlOf(server, { options: `tls=true&tlsCAFile=${encodeURIComponent(ca)}` }))
  await locksWork(fixture, urlOf(server), { tls: { insecure: true } })
  const untrusted =
    /its certificate is from an authority that is not trusted here \(tls\.caFile names one that is\): .*(UnknownIssuer|BadSignature)/
  await assertConnectFails(urlOf(server, { options: 'tls=true' }), { retryable: false, why: untrusted })
  await assertConnectFails(urlOf(server), { retryable: false, tls: { caFile: stranger }, why: untrusted })
  await assertConnectFails(urlOf(server, { login: `app:${SECRET}` }), {
    retryable: false,
    why: /it speaks nothing but TLS: set tls=true in the URL, or the option tls/,
  })

  const named = await fixture.start({ args: requireTls(elsewhere, ca, ANONYMOUS) })
  await assertConnectFails(urlOf(named), {
    retryable: false,
    tls: { caFile: ca },
    why: /its certificate is for another host name: .*127\.0\.0\.1/,
  })
  const plain = await fixture.start()
  await assertConnectFails(urlOf(plain), { retryable: false, tls: { caFile: ca }, why: /it does not speak TLS/ })
})

withMongod('TLS sends the client certificate', async (fixture) => {
  const { ca, server: identity, client, forged } = await authorities(fixture)
  const server = await fixture.start({ args: requireTls(identity, ca) })
  await locksWork(fixture, urlOf(server), { tls: { caFile: ca, certFile: client.both } })
  await locksWork(fixture, urlOf(server), { tls: { caFile: ca, certFile: client.cert, keyFile: client.key } })
  const url = `tls=true&tlsCAFile=${encodeURIComponent(ca)}&tlsCertificateKeyFile=${encodeURIComponent(client.both)}`
  await locksWork(fixture, urlOf(server, { options: url }))
  // Retryable: a server that shuts down closes the connection in the same way.
  const unwelcome =
    /it ended the connection without an answer, as a server does that asks for a client's certificate \(tls\.certFile\)|reset/
  await assertConnectFails(urlOf(server), { retryable: true, tls: { caFile: ca }, why: unwelcome })
  await assertConnectFails(urlOf(server), {
    retryable: true,
    tls: { caFile: ca, certFile: forged.both },
    why: unwelcome,
  })
  await assertConnectFails(urlOf(server), { retryable: false, why: /it speaks nothing but TLS/ })
  await rejects(
    LockService.connect(urlOf(server), { tls: { caFile: ca, certFile: client.cert } }),
    'LOCK_INVALID_ARGUMENT',
  )
  await rejects(
    LockService.connect(urlOf(server), { tls: { caFile: ca, keyFile: client.key } }),
    'LOCK_INVALID_ARGUMENT',
  )
})

withMongod('a client certificate is a login with MONGODB-X509', async (fixture) => {
  const { ca, server: identity, client } = await authorities(fixture)
  const args = ['--tlsMode', 'allowTLS', '--tlsCertificateKeyFile', identity.both, '--tlsCAFile', ca, ANONYMOUS]
  const server = await fixture.startWithAuth({ args })
  const external = server.admin.db('$external')
  const roles = [{ role: 'readWrite', db: 'shop' }]
  const tls = { caFile: ca, certFile: client.both }
  const url = urlOf(server, { path: 'shop', options: 'authMechanism=MONGODB-X509' })
  await assertConnectFails(url, { retryable: false, tls, why: /wrong user|cannot log in|not found/i })
  await external.command({ createUser: 'CN=client,O=client', roles })
  await locksWork(fixture, url, { tls })
})

withMongod('every grant has the write concern of the URL', async (fixture) => {
  const set = await fixture.start({ replicaSet: true })
  const client = await fixture.client(set, '', '')
  /** @type {[string, string, { w: string | number, j?: boolean, wtimeout?: number }][]} */
  const concerns = [
    // 0.8 of the store timeout, so that a missing majority is named in time.
    ['none', '', { w: 'majority', wtimeout: 4000 }],
    ['majority', 'w=majority&wtimeoutMS=1234', { w: 'majority', wtimeout: 1234 }],
    ['one', 'w=1', { w: 1, wtimeout: 4000 }],
    ['journal', 'journal=false', { w: 'majority', j: false, wtimeout: 4000 }],
    ['both', 'w=1&journal=true', { w: 1, j: true, wtimeout: 4000 }],
  ]
  for (const [name, options, concern] of concerns) {
    const db = client.db(name)
    const service = await fixture.connect(urlOf(set, { path: name, options }))
    await db.command({ profile: 2 })
    const lock = await service.acquire('n')
    await lock.extend(60_000)
    await lock.release()
    await db.command({ profile: 0 })
    const writes = await db
      .collection('system.profile')
      .find({ ns: `${name}.locks`, op: { $in: ['insert', 'update', 'remove', 'command'] } })
      .toArray()
    const written = writes
      .map(({ command }) => command.writeConcern)
      .filter(Boolean)
      .map(({ w, j, wtimeout }) => JSON.stringify({ w, j, wtimeout }))
    const wanted = JSON.stringify({ w: concern.w, j: concern.j, wtimeout: concern.wtimeout })
    // The first write of an acquisition may have w=1: the grant follows a write with the full concern. A release has w=1 and the journal.
    assert.ok(written.filter((one) => one === wanted).length >= 1, `${name}: ${written}`)
    assert.ok(
      written.every((one) => [wanted, JSON.stringify({ w: 1 }), JSON.stringify({ w: 1, j: concern.j })].includes(one)),
      `${name}: ${written}`,
    )
  }
  const error = await rejects(LockService.connect(urlOf(set, { options: 'w=2' })), 'LOCK_STORE', { retryable: false })
  assert.match(error.message, /not enough data-bearing nodes/i)
})

it('an invalid URL rejects before any server is contacted', async () => {
  for (const url of [
    `mongodb://app:${SECRET}@127.0.0.1:1,127.0.0.1:2/?directConnection=true`,
    `mongodb+srv://app:${SECRET}@h.example.com:27017/shop`,
    `mongodb+srv://app:${SECRET}@h.example.com,i.example.com/shop`,
    `mongodb://app:${SECRET}@127.0.0.1:1/?authMechanism=SCRAM-SHA-7`,
    `mongodb://app:${SECRET}@127.0.0.1:1/?w=0`,
    `mongodb://app:${SECRET}@127.0.0.1:1/?journal=perhaps`,
    `mongodb://app:${SECRET}@127.0.0.1:1/?wtimeoutMS=soon`,
    `mongodb://app:${SECRET}@127.0.0.1:1/?tls=true&tlsCAFile=/does/not/exist.pem`,
  ]) {
    const error = await rejects(LockService.connect(url), 'LOCK_INVALID_ARGUMENT')
    assert.match(error.message, /^target /)
    assert.doesNotMatch(error.message, new RegExp(SECRET))
  }
})
