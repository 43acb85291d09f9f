// TLS and logins: what is verified, what an error says, a login that lasts, and permissions that are revoked at run time.
import assert from 'node:assert/strict'
import { mkdirSync, mkdtempSync, readFileSync, rmSync } from 'node:fs'
import net from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { certify, makeAuthority } from '../../scripts/certificates.mjs'
import { LockService } from '../../index.js'
import { cli } from '../cli.mjs'
import { skip } from '../stores.mjs'
import { rejects, sleep, until } from '../tools.mjs'

const PASSWORD = 'p@ss:w/rd'
const LOGIN = `app:${encodeURIComponent(PASSWORD)}`

/** Declares the suite. `driver` starts servers with TLS and with users; see `drivers/`. */
export function security(driver) {
  describe(`${driver.kind}: TLS and logins`, { timeout: 180_000 }, () => {
    const dir = mkdtempSync(join(tmpdir(), 'holdfast-security-'))
    const file = (...parts) => join(dir, ...parts)
    let reason = ''
    /** @type {Record<string, any>} With TLS; with TLS for clients that have a certificate; without TLS, with a user. */
    let servers = {}
    before(async () => {
      await driver.locate().catch((error) => (reason = error.message))
      if (reason) return
      const ca = await makeAuthority(dir).catch((error) => void (reason = `no openssl: ${error.message}`))
      if (!ca) return
      const own = await certify(dir, 'server', { hosts: 'DNS:localhost' })
      await certify(dir, 'client', { usage: 'clientAuth' })
      mkdirSync(file('other'))
      await makeAuthority(file('other'))
      const [open, mutual, users] = await Promise.all([
        driver.start({ tls: own }),
        driver.start({ tls: { ...own, ca } }),
        driver.startWithUsers({ user: 'app', password: PASSWORD, prefix: 'test/' }),
      ])
      servers = { open, mutual, users }
    })
    after(async () => {
      await Promise.all(Object.values(servers).map((server) => server.stop()))
      rmSync(dir, { recursive: true, force: true })
    })
    const test = (title, body) => it(title, { timeout: 60_000 }, (t) => (reason ? skip(t, reason) : body(t)))
    const works = async (url, options) => {
      const locks = await LockService.connect(url, { storeTimeoutMs: 3000, keyPrefix: 'test/', ...options })
      try {
        assert.equal(await locks.using(['n', 'm'], (lock) => lock.isHeld), true)
      } finally {
        await locks.close()
      }
    }
    const fails = async (url, options, pattern) => {
      const error = await rejects(works(url, options), 'LOCK_STORE', { engine: driver.kind })
      assert.match(error.message, pattern)
      assert.doesNotMatch(error.message, /p@ss|p%40ss/)
      return error
    }

    test('the certificate of the server and its name are verified', async () => {
      const url = (host, login) => driver.url({ ...servers.open, host, login, tls: true })
      const tls = { caFile: file('ca.crt') }
      await works(url('localhost'), { tls })
      // Its nodes are closed to the others.
      await works(url('localhost', LOGIN), { tls, keyPrefix: 'test/login/' })
      await works(url('localhost'), { tls: { ca: readFileSync(file('ca.crt'), 'utf8') } })
      await works(url('127.0.0.1'), { tls: { insecure: true } })
      await fails(url('127.0.0.1'), { tls }, /use the name in the certificate/)
      const unknown = /not trusted here: set tls\.caFile/
      await fails(url('localhost'), {}, unknown)
      await fails(url('localhost'), { tls: { caFile: file('other', 'ca.crt') } }, unknown)
    })

    test('a server may require a client certificate', async () => {
      const url = driver.url({ ...servers.mutual, host: 'localhost', tls: true })
      const tls = { caFile: file('ca.crt') }
      await works(url, { tls: { ...tls, certFile: file('client.crt'), keyFile: file('client.key') } })
      const text = (name) => readFileSync(file(name), 'utf8')
      await works(url, { tls: { ca: text('ca.crt'), cert: text('client.crt'), key: text('client.key') } })
      await fails(url, { tls }, /tls\.certFile/)
      const files = ['--ca-file', file('ca.crt'), '--cert-file', file('client.crt'), '--key-file', file('client.key')]
      const { code, stderr } = await cli('ls', '--url', url, ...files)
      assert.equal(code, 0, stderr)
    })

    test('a URL with TLS for a port without it, and the reverse, are named in the error', async () => {
      const tls = { caFile: file('ca.crt') }
      await fails(driver.url({ ...servers.users, host: 'localhost', tls: true }), { tls }, driver.errors.noTls)
      await fails(driver.url({ ...servers.open, host: 'localhost' }), {}, driver.errors.onlyTls)
    })

    // A server allows some 250 streams on a connection with TLS.
    test('300 waits through TLS', async () => {
      const url = driver.url({ ...servers.open, host: 'localhost', tls: true })
      const options = { tls: { caFile: file('ca.crt') }, keyPrefix: 'test/many/', ...driver.service }
      const [a, b] = await Promise.all([LockService.connect(url, options), LockService.connect(url, options)])
      const names = Array.from({ length: 300 }, (_, index) => `n${index}`)
      const held = await Promise.all(names.map((name) => a.acquire(name)))
      const own = await b.acquire('own', { ttlMs: 4000 })
      const waits = names.map((name) => b.using(name, { waitMs: 50_000 }, (lock) => lock.isHeld))
      await until('the waits', () => b.stats().waiting === 300, 30_000)
      await sleep(5000)
      assert.ok(own.isHeld)
      assert.equal(await own.release(), true)
      await Promise.all(held.map((lock) => lock.release()))
      assert.ok((await Promise.all(waits)).every(Boolean))
      await Promise.all([a.close(), b.close()])
    })

    test('a server that accepts a connection and is silent is left', async () => {
      let isSilent = false
      /** @type {Set<net.Socket>} */
      const sockets = new Set()
      const proxy = net.createServer((client) => {
        sockets.add(client.on('error', () => {}))
        if (isSilent) return client.resume()
        const upstream = net.connect(servers.open.tlsPort || servers.open.port, '127.0.0.1').on('error', () => {})
        client.pipe(upstream).pipe(client)
        client.on('close', () => upstream.destroy())
      })
      const port = await new Promise((resolve) =>
        proxy.listen(0, '127.0.0.1', () => resolve(/** @type {net.AddressInfo} */ (proxy.address()).port)),
      )
      const options = { tls: { caFile: file('ca.crt') }, keyPrefix: 'test/', storeTimeoutMs: 2000, ...driver.service }
      const locks = await LockService.connect(driver.url({ port, host: 'localhost', tls: true }), options)
      isSilent = true
      for (const socket of sockets) socket.destroy()
      await rejects(locks.tryAcquire('n'), 'LOCK_STORE', { retryable: true })
      isSilent = false
      const lock = await until('a grant', () => locks.tryAcquire('n').catch(() => null), 20_000)
      assert.equal(await lock.release(), true)
      await locks.close()
      for (const socket of sockets) socket.destroy()
      proxy.close()
    })

    test('a login is needed, and other logins are refused', async () => {
      const url = (login) => driver.url({ ...servers.users, login })
      await works(url(LOGIN))
      await works(url(), { username: 'app', password: PASSWORD })
      const { wrongPassword, noLogin, otherPrefix } = driver.errors
      assert.equal((await fails(url('app:wrong'), {}, wrongPassword)).retryable, false)
      assert.equal((await fails(url(), {}, noLogin)).retryable, false)
      // ZooKeeper's permissions are those of a folder, which is in the URL.
      if (!otherPrefix) return
      assert.equal((await fails(url(LOGIN), { keyPrefix: 'other/' }, otherPrefix)).retryable, false)
    })

    // A login without a token lasts as long as its connection.
    test('a lock outlives the token of its login, and its waiter too', async () => {
      const url = driver.url({ ...servers.users, login: LOGIN })
      const connect = () => LockService.connect(url, { keyPrefix: 'test/' })
      const [a, b] = [await connect(), await connect()]
      const lock = await a.acquire('long', { ttlMs: 9000 })
      const wait = b.acquire('long', { waitMs: 60_000 })
      // Tokens expire after 2 s without use, and a renewal comes every 3 s; of a shorter lease, every 1.6 s.
      await sleep(10_000)
      assert.ok(lock.isHeld)
      assert.equal(await lock.release(), true)
      const next = await wait
      assert.equal(await next.release(), true)
      await Promise.all([a.close(), b.close()])
    })

    test('rights that are revoked at run time, and given again', async () => {
      const url = driver.url({ ...servers.users, login: LOGIN })
      const locks = await LockService.connect(url, { keyPrefix: 'test/', storeTimeoutMs: 2000 })
      const lock = await locks.acquire('revoked', { ttlMs: 2000 })
      await driver.revoke(servers.users)
      const refused = async () => {
        const error = await rejects(locks.tryAcquire('other'), 'LOCK_STORE', { retryable: false })
        assert.match(error.message, /permission/)
      }
      if (driver.revokedLocksLast) {
        await refused()
        await sleep(6000)
        assert.ok(lock.isHeld, 'its renewals read its own node')
      } else {
        await until('the loss', () => lock.signal.aborted)
        assert.match(lock.signal.reason.message, /permission/)
      }
      await refused()
      await driver.grant(servers.users)
      if (driver.revokedLocksLast) assert.equal(await lock.release(), true)
      let again
      while (!again) again = await locks.tryAcquire('revoked').catch(() => null)
      assert.ok(again.fencingToken > lock.fencingToken)
      assert.equal(await again.release(), true)
      await locks.close()
    })
  })
}
