// TLS and logins on ZooKeeper: what is verified, and what the errors say.
import assert from 'node:assert/strict'
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { certify, makeAuthority } from '../scripts/certificates.mjs'
import { freePort } from '../scripts/servers.mjs'
import { locateZookeeper, startZookeeper } from '../scripts/zookeeper.mjs'
import { canStartServer, connectWith, skip } from './stores.mjs'
import { rejects, sleep } from './tools.mjs'
import { withZookeeper } from './zookeeper-client.mjs'

const PASSWORD = 'p@ss:w/rd'
const ENCODED = encodeURIComponent(PASSWORD)

describe('zookeeper: TLS and logins', { concurrency: 2 }, () => {
  const dir = mkdtempSync(join(tmpdir(), 'holdfast-zookeeper-'))
  /** @type {{ stop: () => Promise<unknown>, port: number }[]} */
  const servers = []
  /** @type {string | undefined} */
  let unable
  let [open, mutual] = [0, 0]
  const file = (/** @type {string} */ name) => join(dir, name)

  before(async () => {
    const can = /** @type {any} */ ({ skip: (/** @type {string} */ reason) => (unable = reason) })
    if (!(await canStartServer(can, 'zookeeper', locateZookeeper))) return
    const ca = await makeAuthority(dir).catch((error) => void (unable = `no openssl: ${error.message}`))
    if (!ca) return
    const { both } = await certify(dir, 'server', { hosts: 'DNS:localhost' })
    await certify(dir, 'client', { usage: 'clientAuth' })
    mkdirSync(file('other'))
    await makeAuthority(file('other'))
    const start = async (/** @type {string} */ clientAuth) => {
      const port = await freePort()
      const settings = {
        secureClientPort: port,
        secureClientPortAddress: '127.0.0.1',
        'ssl.keyStore.location': both,
        'ssl.trustStore.location': ca,
        'ssl.keyStore.type': 'PEM',
        'ssl.trustStore.type': 'PEM',
        'ssl.clientAuth': clientAuth,
      }
      const options = [
        '-Dzookeeper.serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory',
        '-Dzookeeper.enforceQuota=true',
      ]
      servers.push(await startZookeeper({ settings, options }))
      return port
    }
    ;[open, mutual] = await Promise.all([start('none'), start('need')])
  })
  after(async () => {
    await Promise.all(servers.map((server) => server.stop()))
    rmSync(dir, { recursive: true, force: true })
  })

  /** @param {string} name @param {() => Promise<void>} body */
  const test = (name, body) => it(name, { timeout: 60_000 }, (t) => (unable ? skip(t, unable) : body()))
  const use = async (/** @type {unknown[]} */ ...target) => {
    const locks = await connectWith(...target)
    try {
      assert.equal(await locks.using(['n', 'm'], (lock) => lock.isHeld), true)
    } finally {
      await locks.close()
    }
  }
  const refused = async (/** @type {RegExp} */ message, /** @type {unknown[]} */ ...target) => {
    const error = await rejects(connectWith(...target), 'LOCK_STORE')
    assert.match(error.message, message)
    assert.ok(!error.message.includes(PASSWORD) && !error.message.includes(ENCODED), error.message)
  }
  const tls = () => ({ caFile: file('ca.crt') })
  const client = () => ({ ...tls(), certFile: file('client.crt'), keyFile: file('client.key') })

  test('the certificate of the server and its name are verified', async () => {
    await use(`zookeepers://localhost:${open}`, { tls: tls() })
    await use(`zookeepers://app:${ENCODED}@localhost:${open}/tls`, { tls: tls() })
    await refused(/set tls.caFile or tls.ca/, `zookeepers://localhost:${open}`)
    await refused(/set tls.caFile or tls.ca/, `zookeepers://localhost:${open}`, {
      tls: { caFile: file('other/ca.crt') },
    })
    await refused(/use the name in the certificate of the server/, `zookeepers://127.0.0.1:${open}`, {
      tls: tls(),
    })
    await use(`zookeepers://127.0.0.1:${open}`, { tls: { insecure: true } })
  })

  test('a server may require a client certificate', async () => {
    await use(`zookeepers://localhost:${mutual}`, { tls: client() })
    await refused(/certificate/, `zookeepers://localhost:${mutual}`, { tls: tls() })
  })

  test('a URL with TLS for a port without it, and the reverse, are named in the error', async () => {
    const [{ port }] = servers
    await refused(/secureClientPort/, `zookeepers://localhost:${port}`, { tls: tls() })
    await refused(/no session/, `zookeeper://localhost:${open}`)
  })

  test('the nodes of a login are closed to other logins', async () => {
    const [{ port }] = servers
    await use(`zookeeper://app:${ENCODED}@localhost:${port}/closed`)
    await use(`zookeeper://localhost:${port}/closed`, { username: 'app', password: PASSWORD })
    for (const url of [`zookeeper://localhost:${port}/closed`, `zookeeper://app:other@localhost:${port}/closed`]) {
      const locks = await connectWith(url)
      const { message } = await rejects(locks.tryAcquire('n'), 'LOCK_STORE', { retryable: false })
      assert.match(message, /NoAuth \(-102\): give the login of the URL the permissions/)
      await locks.close()
    }
  })

  test('rights that are revoked at run time, and given again', async () => {
    const [{ port }] = servers
    const url = `zookeeper://app:${ENCODED}@localhost:${port}/revoked`
    const locks = await connectWith(url)
    const held = await locks.acquire('held')
    await withZookeeper(url, async (other) => {
      await other.addAuth(`app:${PASSWORD}`)
      const all = [{ perms: 31, scheme: 'auth', id: '' }]
      await other.setAcl('/revoked', [{ perms: 16, scheme: 'auth', id: '' }])
      const { message } = await rejects(locks.tryAcquire('new'), 'LOCK_STORE', { retryable: false })
      assert.match(message, /NoAuth \(-102\)/)
      // Its renewals read its own node.
      await sleep(3000)
      assert.ok(held.isHeld)
      await other.setAcl('/revoked', all)
    })
    await (await locks.acquire('new')).release()
    assert.equal(await held.release(), true)
    await locks.close()
  })

  test('a quota that is exceeded, and raised', async () => {
    const [{ port }] = servers
    const url = `zookeeper://localhost:${port}/quota`
    const locks = await connectWith(url, { storeTimeoutMs: 1000 })
    await withZookeeper(url, async (other) => {
      await other.create('/zookeeper/quota/quota')
      await other.create(
        '/zookeeper/quota/quota/zookeeper_limits',
        'count=-1,bytes=-1=;byteHardLimit=-1;countHardLimit=5',
      )
      await other.create('/zookeeper/quota/quota/zookeeper_stats', 'count=1,bytes=0')
      const held = []
      const error = await (async () => {
        for (let index = 0; index < 20; index++) held.push(await locks.acquire(`n${index}`))
      })().catch((error) => error)
      assert.equal(error?.code, 'LOCK_STORE', 'the quota has room for two locks')
      assert.match(error.message, /QuotaExceeded \(-125\): raise the quota/)
      assert.equal(error.retryable, true)
      await sleep(3000)
      assert.ok(
        held.every((lock) => lock.isHeld),
        'renewals go on',
      )
      await other.delete('/zookeeper/quota/quota/zookeeper_limits')
      await (await locks.acquire('more')).release()
    })
    await locks.close()
  })
})
