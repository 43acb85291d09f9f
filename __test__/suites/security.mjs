// TLS, sockets and logins: what is verified, what an error says, a login that lasts, and permissions that are revoked at run time.
import assert from 'node:assert/strict'
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { certify, makeAuthority } from '../../scripts/certificates.mjs'
import { LockService } from '../../index.js'
import { start } from '../cli.mjs'
import { startProxy } from '../proxy.mjs'
import { canStartServer, skip } from '../stores.mjs'
import { later, rejects, sleep, until } from '../tools.mjs'

const PASSWORD = 'p@ss:w/rd'
const LOGIN = `app:${encodeURIComponent(PASSWORD)}`

/** Here a certificate that is not trusted ends a call at once, also after `connect`, and a port without TLS does not. */
const FAIL_AT_ONCE = ['etcd', 'zookeeper']

/** Starts the servers of a store that has one for each purpose. */
async function startSeparately(driver, { own, ca, user, password, prefix }) {
  const [open, mutual, users] = await Promise.all([
    driver.start({ tls: own }),
    driver.start({ tls: { ...own, ca } }),
    driver.startWithUsers({ user, password, prefix }),
  ])
  return { open, mutual, users }
}

/**
 * Declares the suite, then calls `cases` with the helpers for the cases of one store. `driver` starts servers with TLS and with users; see
 * `drivers/`.
 *
 * @param {any} driver
 * @param {(suite: any) => void} [cases]
 */
export function security(driver, cases) {
  describe(`${driver.kind}: TLS and logins`, { timeout: 240_000, concurrency: 1 }, () => {
    const dir = mkdtempSync(join(tmpdir(), 'holdfast-security-'))
    const file = (...parts) => join(dir, ...parts)
    let reason = ''
    /** @type {Record<string, any>} With TLS; with TLS for clients that have a certificate; without TLS, with a user. */
    const servers = {}
    before(async () => {
      const can = { skip: (why) => (reason = why) }
      if (!(await canStartServer(can, driver.kind, driver.locate))) return
      const ca = await makeAuthority(dir).catch((error) => void (reason = `no openssl: ${error.message}`))
      if (!ca) return
      const own = await certify(dir, 'server', { hosts: 'DNS:localhost,DNS:db.example' })
      // PostgreSQL takes the name in it as the user.
      await certify(dir, 'cert', { usage: 'clientAuth' })
      mkdirSync(file('other'))
      await makeAuthority(file('other'))
      const how = { own, ca, login: LOGIN, user: 'app', password: PASSWORD, prefix: 'test/' }
      Object.assign(servers, await (driver.startSecure?.(how) ?? startSeparately(driver, how)))
    })
    after(async () => {
      await Promise.all(Object.values(servers).map((server) => server.stop()))
      rmSync(dir, { recursive: true, force: true })
    })
    /** @type {{ close: () => Promise<void> }[]} The proxies and services of a test. */
    const opened = []
    const test = (title, body) =>
      it(title, { timeout: 60_000 }, async (t) => {
        if (reason) return skip(t, reason)
        try {
          await body(t)
        } finally {
          // The service before its proxy.
          for (const one of opened.splice(0).reverse()) await one.close()
        }
      })
    const connect = async (url, options) => {
      const locks = await LockService.connect(url, { storeTimeoutMs: 3000, keyPrefix: 'test/', ...options })
      opened.push(locks)
      return locks
    }
    /** Starts a proxy in front of the server with TLS. */
    const openProxy = async () => {
      const proxy = await startProxy(servers.open.tlsPort || servers.open.port)
      opened.push(proxy)
      return proxy
    }
    /** Uses locks. `isSecure`: whether the connections have TLS. */
    const works = (url, options, isSecure) => use(url, { ...driver.service, ...options }, isSecure)
    const use = async (url, options, isSecure) => {
      const locks = await connect(url, options)
      try {
        assert.equal(await locks.using(['n', 'm'], (lock) => lock.isHeld), true)
        // Connections of other services may be about to end.
        if (driver.areSecure && isSecure !== undefined)
          await until(`TLS: ${isSecure}`, async () => (await driver.areSecure(servers.open)) === isSecure)
      } finally {
        await locks.close()
      }
    }
    const fails = async (url, options, pattern, expected = {}) => {
      const error = await rejects(use(url, options), 'LOCK_STORE', { engine: driver.kind, ...expected })
      assert.match(error.message, pattern)
      assert.doesNotMatch(error.message, /p@ss|p%40ss/)
      return error
    }
    const refused = (url, options, pattern) => fails(url, options, pattern, { retryable: false })
    const secure = (host, more) => driver.url({ ...servers.open, host, tls: true, ...more })
    const tls = { caFile: file('ca.crt') }
    const { named, any } = driver.modes ?? { named: [undefined] }

    test('the certificate of the server and its name are verified', async () => {
      await works(secure('localhost'), { tls }, true)
      // Its nodes are closed to the others.
      await works(secure('localhost', { login: LOGIN }), { tls, keyPrefix: 'test/login/' }, true)
      await works(secure('localhost'), { tls: { ca: readFileSync(file('ca.crt'), 'utf8') } }, true)
      await works(secure('127.0.0.1'), { tls: { insecure: true } }, true)
      for (const mode of named) {
        await works(secure('localhost', { mode }), { tls }, true)
        await refused(
          secure('127.0.0.1', { mode }),
          { tls },
          driver.errors.otherName ?? /use the name in the certificate/,
        )
      }
      if (any) await works(secure('127.0.0.1', { mode: any }), { tls }, true)
      for (const mode of any ? [...named, any] : named) {
        const unknown = driver.errors.untrusted ?? /not trusted here: set tls\.caFile/
        await refused(secure('localhost', { mode }), {}, unknown)
        await refused(secure('localhost', { mode }), { tls: { caFile: file('other', 'ca.crt') } }, unknown)
      }
    })

    test('an authority that is exchanged while a service runs', async () => {
      const path = file('exchanged.crt')
      copyFileSync(file('ca.crt'), path)
      const proxy = await openProxy()
      const locks = await connect(secure('localhost', { tlsPort: 0, port: proxy.port }), { tls: { caFile: path } })
      copyFileSync(file('other', 'ca.crt'), path)
      proxy.cut()
      await until('a new connection does not trust the server', async () => {
        const error = await locks.tryAcquire('n').then(
          (lock) => void lock?.release().catch(() => {}),
          (error) => error,
        )
        if (error) assert.equal(error.retryable, !FAIL_AT_ONCE.includes(driver.kind), error.message)
        return /not trusted/.test(error?.message)
      })
      copyFileSync(file('ca.crt'), path)
      const lock = await until('a lock', () => locks.tryAcquire('n').catch(() => null))
      assert.equal(await lock.release(), true)
    })

    test('SSL_CERT_FILE has the authorities of the system, and --ca-file of the command line is tls.caFile', async () => {
      const ls = (url, file, env) => start(['ls', '--url', url, ...(file ? ['--ca-file', file] : [])], env).ended
      const url = secure('localhost')
      const open = driver.url({ ...servers.users, login: LOGIN })
      const [unknown, ofFile, ofSystem, { code, stderr }] = await Promise.all([
        ls(url),
        ls(url, tls.caFile),
        ls(url, undefined, { SSL_CERT_FILE: tls.caFile }),
        ls(open, tls.caFile),
      ])
      assert.deepEqual([unknown.code, ofFile.code, ofSystem.code, code], [69, 0, 0, 64], stderr)
      const { tlsOption = `tls must be absent for ${driver.kind}://` } = driver.errors
      assert.ok(stderr.startsWith(`holdfast: ${tlsOption}`), stderr)
      const { message } = await rejects(LockService.connect(open, { tls: { insecure: true } }), 'LOCK_INVALID_ARGUMENT')
      assert.ok(message.startsWith(tlsOption), message)
    })

    test('a server may require a client certificate', async () => {
      const url = driver.url({ ...servers.mutual, host: 'localhost', tls: true })
      const [certFile, keyFile] = ['cert.crt', 'cert.key'].map((name) => file(name))
      await works(url, { tls: { ...tls, certFile, keyFile } }, true)
      const text = (name) => readFileSync(file(name), 'utf8')
      await works(url, { tls: { ca: text('ca.crt'), cert: text('cert.crt'), key: text('cert.key') } }, true)
      await fails(url, { tls }, /tls\.certFile/)
      const files = ['--ca-file', tls.caFile, '--cert-file', certFile, '--key-file', keyFile]
      const { code, stderr } = await start(['ls', '--url', url, ...files]).ended
      assert.equal(code, 0, stderr)
    })

    test('a URL with TLS for a port without it, and the reverse, are named in the error', async () => {
      const expected = { retryable: FAIL_AT_ONCE.includes(driver.kind) }
      await fails(
        driver.url({ ...servers.users, host: 'localhost', tls: true }),
        { tls },
        driver.errors.noTls ?? /TLS/,
        expected,
      )
      await fails(driver.url({ ...servers.open, host: 'localhost' }), {}, driver.errors.onlyTls)
    })

    // A server allows some 250 streams on a connection with TLS.
    test('300 waits through TLS', async () => {
      const options = { tls, keyPrefix: 'test/many/', storeTimeoutMs: 10_000, ...driver.service }
      const [a, b] = await Promise.all([connect(secure('localhost'), options), connect(secure('localhost'), options)])
      const names = Array.from({ length: 300 }, (_, index) => `n${index}`)
      const held = await Promise.all(names.map((name) => a.acquire(name)))
      const own = await b.acquire('own', { ttlMs: 4500 })
      const waits = names.map((name) => later(b.using(name, { waitMs: 50_000 }, (lock) => lock.isHeld)))
      await until('the waits', () => b.stats().waiting === 300, 30_000)
      await sleep(5000)
      assert.ok(own.isHeld)
      assert.equal(await own.release(), true)
      await Promise.all(held.map((lock) => lock.release()))
      assert.ok((await Promise.all(waits)).every(Boolean))
    })

    test('a server that accepts a connection and is silent is left', async () => {
      const proxy = await openProxy()
      const url = secure('localhost', { tlsPort: 0, port: proxy.port })
      const locks = await connect(url, { tls, storeTimeoutMs: 2000, ...driver.service })
      proxy.hangsNew = true
      proxy.cut()
      await rejects(locks.tryAcquire('n'), 'LOCK_STORE', { retryable: true })
      proxy.hangsNew = false
      const lock = await until('a grant', () => locks.tryAcquire('n').catch(() => null), 20_000)
      assert.equal(await lock.release(), true)
    })

    test('a login is needed, and other logins are refused', async () => {
      const url = (login) => driver.url({ ...servers.users, login })
      await works(url(LOGIN))
      await works(url(), { username: 'app', password: PASSWORD })
      const { wrongPassword, noLogin, otherPrefix } = driver.errors
      await refused(url('app:wrong'), {}, wrongPassword)
      if (noLogin) await refused(url(), {}, noLogin)
      if (otherPrefix) await refused(url(LOGIN), { keyPrefix: 'other/' }, otherPrefix)
    })

    // How long a token lasts without use.
    if (driver.loginLastsMs)
      test('a lock outlives the token of its login, and its waiter too', async () => {
        const url = driver.url({ ...servers.users, login: LOGIN })
        const [a, b] = [await connect(url), await connect(url)]
        const lock = await a.acquire('long', { ttlMs: 9000 })
        const wait = later(b.acquire('long', { waitMs: 60_000 }))
        // A renewal comes every 3 s, when the token has expired; of a shorter lease, every 1.6 s.
        await sleep(5 * driver.loginLastsMs)
        assert.ok(lock.isHeld)
        assert.equal(await lock.release(), true)
        const next = await wait
        assert.equal(await next.release(), true)
      })

    if (driver.setPassword)
      test('a password that rotates', async () => {
        let [password, calls] = [PASSWORD, 0]
        const credentials = () => {
          calls++
          return { username: 'app', password }
        }
        const url = driver.url(servers.users)
        const locks = await connect(url, { credentials, storeTimeoutMs: 4000 })
        const held = await locks.acquire('held', { ttlMs: 9000 })
        const before = calls
        assert.ok(before > 0)
        await driver.setPassword(servers.users, 'two')
        // The function still returns the old password: that is no permanent error.
        await rejects(locks.acquire('other', { waitMs: 500 }), 'LOCK_STORE', { retryable: true })
        password = 'two'
        const { renewed } = locks.stats()
        await until('the lease is renewed on a new connection', () => locks.stats().renewed > renewed)
        assert.ok(calls > before)
        assert.equal(await held.release(), true)
        await driver.setPassword(servers.users, PASSWORD)
        const failing = connect(url, { credentials: () => Promise.reject(new Error('no token')) })
        const error = await rejects(failing, 'LOCK_STORE', { retryable: true })
        assert.match(error.message, /no login for a new connection: .*failed: no token/)
      })

    if (driver.socketUrls)
      test('a Unix socket', async () => {
        for (const url of driver.socketUrls(servers.users)) {
          const locks = await connect(url)
          const lock = await locks.acquire(['n', 'm'])
          await until('connections of TCP have ended', async () => {
            const areLocal = await driver.areLocal(servers.users)
            return areLocal.length > 0 && areLocal.every(Boolean)
          })
          assert.equal(await lock.release(), true)
          await locks.close()
        }
      })

    if (driver.lockRows)
      test('a statement of a call that rejects is cancelled at the server, over TLS', async () => {
        // A service that knows of the locked row waits only briefly for it.
        const open = () => connect(secure('localhost'), { tls, storeTimeoutMs: 3000 })
        const [one, other] = [await open(), await open()]
        for (const locks of [one, other]) assert.equal(await locks.using(['n', 'm'], (lock) => lock.isHeld), true)
        await driver.connected(servers.open.url, async (run) => {
          await run(driver.lockRows)
          for (const call of [() => one.tryAcquire('n'), () => other.acquire(['n', 'm'])]) {
            let refusal
            const isWaiting = async () => {
              // On a machine that stands still a call may end before its statement is seen.
              refusal ??= later(rejects(call(), 'LOCK_STORE', { retryable: true }).finally(() => (refusal = undefined)))
              return (await driver.rowWaits(run)) > 0
            }
            await until('a statement that waits', isWaiting)
            await refusal
            await until('no statement is left', async () => (await driver.rowWaits(run)) === 0)
          }
          await run('ROLLBACK')
        })
        for (const locks of [one, other]) {
          assert.equal(await locks.using(['n', 'm'], (lock) => lock.isHeld), true)
          await locks.close()
        }
      })

    test('rights that are revoked at run time, and given again', async () => {
      const url = driver.url({ ...servers.users, login: LOGIN })
      const locks = await connect(url, { storeTimeoutMs: 4000 })
      const lock = await locks.acquire('revoked', { ttlMs: 6000 })
      await driver.revoke(servers.users)
      const { permission = /permission/ } = driver.errors
      const isRefused = async () => {
        const error = await rejects(locks.tryAcquire('other'), 'LOCK_STORE', { retryable: false })
        assert.match(error.message, permission)
      }
      if (driver.revokedLocksLast) {
        await isRefused()
        await sleep(7000)
        assert.ok(lock.isHeld, 'its renewals read its own node')
      } else {
        await until('the loss', () => lock.signal.aborted)
        assert.match(lock.signal.reason.message, permission)
      }
      await isRefused()
      await driver.grant(servers.users)
      if (driver.revokedLocksLast) assert.equal(await lock.release(), true)
      let again
      while (!again) again = await locks.tryAcquire('revoked').catch(() => null)
      assert.ok(again.fencingToken > lock.fencingToken)
      assert.equal(await again.release(), true)
      await locks.close()
    })

    cases?.({ test, connect, works, refused, servers, file, secure, LOGIN, PASSWORD })
  })
}
