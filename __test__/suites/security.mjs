// TLS and logins: what is verified, what an error says, tokens that expire, and rights that are revoked at run time.
import assert from 'node:assert/strict'
import { mkdirSync, mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { certify, makeAuthority } from '../../scripts/certificates.mjs'
import { LockService } from '../../index.js'
import { skip } from '../stores.mjs'
import { rejects, sleep, until } from '../tools.mjs'

const PASSWORD = 'p@ss:w/rd'

/** Declares the suite. `driver` starts servers with TLS and with users; see `drivers/etcd.mjs`. */
export function security(driver) {
  describe(`${driver.kind}: TLS and logins`, { timeout: 180_000 }, () => {
    const dir = mkdtempSync(join(tmpdir(), 'holdfast-security-'))
    const file = (...parts) => join(dir, ...parts)
    let reason = ''
    /** @type {any} */
    let secure
    /** @type {any} */
    let users
    before(async () => {
      await driver.locate().catch((error) => (reason = error.message))
      if (reason) return
      const ca = await makeAuthority(dir).catch((error) => void (reason = `no openssl: ${error.message}`))
      if (!ca) return
      const { cert, key } = await certify(dir, 'server', { hosts: 'DNS:localhost' })
      await certify(dir, 'client', { usage: 'clientAuth' })
      mkdirSync(file('other'))
      await makeAuthority(file('other'))
      secure = await driver.start({ tls: { cert, key, ca } })
      users = await driver.startWithUsers({ user: 'app', password: PASSWORD, prefix: 'test/' })
    })
    after(async () => {
      await Promise.all([secure?.stop(), users?.stop()])
      rmSync(dir, { recursive: true, force: true })
    })
    const test = (title, body) => it(title, { timeout: 60_000 }, (t) => (reason ? skip(t, reason) : body(t)))
    const works = async (url, options) => {
      const locks = await LockService.connect(url, { storeTimeoutMs: 3000, keyPrefix: 'test/', ...options })
      try {
        const lock = await locks.acquire('n')
        assert.equal(await lock.release(), true)
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

    test('the certificates of both sides are verified', async () => {
      const url = (host) => driver.url({ ...secure, host, tls: true })
      const client = { certFile: file('client.crt'), keyFile: file('client.key') }
      const tls = { caFile: file('ca.crt'), ...client }
      await works(url('localhost'), { tls })
      const text = (name) => readFileSync(file(name), 'utf8')
      await works(url('localhost'), { tls: { ca: text('ca.crt'), cert: text('client.crt'), key: text('client.key') } })
      await works(url('127.0.0.1'), { tls: { insecure: true, ...client } })
      await fails(url('127.0.0.1'), { tls }, /use the name in the certificate/)
      await fails(
        url('localhost'),
        { tls: { ...tls, caFile: file('other', 'ca.crt') } },
        /not trusted here: set tls\.caFile/,
      )
      await fails(url('localhost'), { tls: { caFile: file('ca.crt') } }, /tls\.certFile/)
      await fails(driver.url({ ...users, host: '127.0.0.1', tls: true }), {}, /TLS/)
      await fails(driver.url({ ...secure, host: '127.0.0.1' }), {}, /connect|connection|broke/)
    })

    test('a login is needed, and sees its prefix only', async () => {
      const url = (login) => driver.url({ ...users, login })
      await works(url(`app:${encodeURIComponent(PASSWORD)}`))
      await works(url(), { username: 'app', password: PASSWORD })
      const wrong = await fails(url('app:wrong'), {}, /user name and the password/)
      assert.equal(wrong.retryable, false)
      assert.equal((await fails(url(), {}, /login/)).retryable, false)
      const other = await fails(url(`app:${encodeURIComponent(PASSWORD)}`), { keyPrefix: 'other/' }, /permission/)
      assert.equal(other.retryable, false)
    })

    test('a lock outlives the token of its login, and its waiter too', async () => {
      const url = driver.url({ ...users, login: `app:${encodeURIComponent(PASSWORD)}` })
      const connect = () => LockService.connect(url, { keyPrefix: 'test/' })
      const [a, b] = [await connect(), await connect()]
      const lock = await a.acquire('long', { ttlMs: 9000 })
      const wait = b.acquire('long', { waitMs: 60_000 })
      // Tokens expire after 2 s without use, and a renewal comes every 3 s.
      await sleep(10_000)
      assert.ok(lock.isHeld)
      assert.equal(await lock.release(), true)
      const next = await wait
      assert.equal(await next.release(), true)
      await Promise.all([a.close(), b.close()])
    })

    test('a lock whose rights are revoked is lost at its end, and service resumes with the rights', async () => {
      const url = driver.url({ ...users, login: `app:${encodeURIComponent(PASSWORD)}` })
      const locks = await LockService.connect(url, { keyPrefix: 'test/', storeTimeoutMs: 2000 })
      const lock = await locks.acquire('revoked', { ttlMs: 2000 })
      await driver.revoke(users)
      await until('the loss', () => lock.signal.aborted)
      assert.match(lock.signal.reason.message, /permission/)
      await rejects(locks.tryAcquire('other'), 'LOCK_STORE', { retryable: false })
      await driver.grant(users)
      let again
      while (!again) again = await locks.tryAcquire('revoked').catch(() => null)
      assert.ok(again.fencingToken > lock.fencingToken)
      assert.equal(await again.release(), true)
      await locks.close()
    })
  })
}
