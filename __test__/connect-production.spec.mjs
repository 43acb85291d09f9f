// How services connect in production: logins that rotate, sockets, servers that start later, outages that calls wait through.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { promisify } from 'node:util'
import { certify, makeAuthority } from '../scripts/certificates.mjs'
import { freePort, locateMongod, locateRedis, startMongod, startRedis } from '../scripts/servers.mjs'
import { LockService } from '../index.js'
import { openRedis } from './redis-client.mjs'
import { canStartServer, connectWith, random } from './stores.mjs'
import { INDEX, later, output, rejects, sleep, stopwatch, until } from './tools.mjs'

const run = promisify(execFile)

/** Declares a test with a Redis server of its own, started with `args`. */
function withRedis(name, args, body) {
  it(name, { timeout: 90_000 }, async (t) => {
    if (!(await canStartServer(t, 'redis', locateRedis))) return
    const server = await startRedis({ args })
    t.after(() => server.stop())
    const connect = async (...target) => {
      const locks = await connectWith(...target)
      t.after(() => locks.close())
      return locks
    }
    await body({ server, connect, t })
  })
}

async function assertWorks(locks) {
  assert.equal(await locks.using('works', (lock) => lock.isHeld), true)
}

describe('logins', { concurrency: 2 }, () => {
  withRedis(
    'an options object names a server and its login',
    ['--requirepass', 'p@ss/w:rd'],
    async ({ server, connect }) => {
      const address = { host: '127.0.0.1', port: server.port }
      const locks = await connect({
        ...address,
        database: 3,
        username: 'default',
        password: 'p@ss/w:rd',
        keyPrefix: 'x:',
      })
      const lock = await locks.acquire('n')
      const redis = openRedis({ ...address, password: 'p@ss/w:rd', db: 3 })
      assert.equal(await redis.exists('x:n'), 1)
      redis.disconnect()
      await lock.release()
      await assertWorks(await connect(`valkey://127.0.0.1:${server.port}`, { password: 'p@ss/w:rd' }))
      await assertWorks(await connect({ ...address, password: async () => 'p@ss/w:rd' }))
      const admin = openRedis({ ...address, password: 'p@ss/w:rd' })
      await admin.call('ACL', 'SETUSER', 'me@work', 'on', '>p@ss', '~*', '&*', '+@all')
      admin.disconnect()
      const ofUser = `redis://me%40work@127.0.0.1:${server.port}`
      for (const password of ['p@ss', async () => 'p@ss']) await assertWorks(await connect(ofUser, { password }))
      await rejects(connect(ofUser, { password: 'p@ss/w:rd' }), 'LOCK_STORE', { retryable: false })
      await rejects(connect(address), 'LOCK_STORE', { retryable: false })
    },
  )

  withRedis('a password that rotates', ['--requirepass', 'one'], async ({ server, connect }) => {
    let [password, calls] = ['one', 0]
    const credentials = () => {
      calls++
      return { password }
    }
    const locks = await connect(server.url, { credentials, storeTimeoutMs: 4000 })
    const held = await locks.acquire('held', { ttlMs: 9000 })
    const redis = openRedis(server.url, { password: 'one' })
    const before = calls
    assert.ok(before > 0)
    // The callback still returns the old password at first: a refused login is retried with another one.
    await redis.config('SET', 'requirepass', 'two')
    const rotated = sleep(500).then(() => (password = 'two'))
    await redis.call('client', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')
    await assertWorks(locks)
    await rotated
    assert.ok(calls > before, 'called for the new connections')
    const { renewed } = locks.stats()
    await until('the lease is renewed on a new connection', () => locks.stats().renewed > renewed)
    assert.equal(held.isHeld, true)
    await held.release()
    redis.disconnect()
  })

  withRedis('a callback that fails, hangs, or returns something else', [], async ({ server, connect }) => {
    /** @type {[credentials: () => unknown, message: RegExp][]} */
    const failures = [
      [() => Promise.reject(new Error('no token')), /no login for a new connection: .*failed: no token$/],
      [
        () => {
          throw new Error('no vault')
        },
        /no vault$/,
      ],
      [
        () => ({ user: 'x', password: 'y' }),
        /must return \{ username\?, password \}, got an object with the unknown key "user"$/,
      ],
      [() => ({ password: 5 }), /must return \{ username\?, password \} with strings, got an object$/],
      [() => new Promise(() => {}), /were not there within 1000 ms$/],
    ]
    for (const [credentials, message] of failures) {
      const attempt = () => {
        const call = connect(server.url, { credentials, storeTimeoutMs: 2000 })
        return rejects(call, 'LOCK_STORE', { retryable: true, engine: 'redis' })
      }
      let error = await attempt()
      // On a machine that stands still the limit of the call may end it before.
      for (let repeats = 0; repeats < 4 && !message.test(error.message); repeats++) error = await attempt()
      assert.match(error.message, message)
    }
    /** @type {[password: () => any, message: RegExp][]} */
    const ofPassword = [
      [() => Promise.reject(new Error('no token')), /the function of password failed: no token$/],
      [() => undefined, /password must return a string, got a value of type undefined$/],
    ]
    for (const [password, message] of ofPassword) {
      const error = await rejects(connect(server.url, { password, storeTimeoutMs: 2000 }), 'LOCK_STORE')
      assert.match(error.message, message)
      assert.doesNotMatch(error.message, /credentials/)
    }
  })

  withRedis('a callback does not keep the process alive', ['--requirepass', 'one'], async ({ server }) => {
    const script = `
      import { LockService } from ${JSON.stringify(INDEX)}
      const locks = await LockService.connect('${server.url}', { credentials: async () => ({ password: 'one' }) })
      await locks.using('n', () => {})
      console.log('done')`
    const { stdout } = await run(process.execPath, ['--input-type=module', '-e', script], { timeout: 60_000 })
    assert.equal(stdout, 'done\n')
  })
})

describe('Unix sockets', { skip: process.platform === 'win32' && 'no Unix sockets on Windows' }, () => {
  const dir = mkdtempSync(join(tmpdir(), 'holdfast-'))
  const path = join(dir, 'redis.sock')
  after(() => rmSync(dir, { recursive: true, force: true }))

  withRedis('Redis', ['--unixsocket', path, '--requirepass', 'p&ss'], async ({ connect }) => {
    for (const target of [`redis+unix://${path}?db=2`, `redis://${path}`, `valkey://${path}`]) {
      await assertWorks(await connect(target, { password: 'p&ss' }))
    }
    const error = await rejects(connect(`redis+unix://${path}x`), 'LOCK_STORE', { retryable: true })
    assert.ok(error.message.includes(`no connection to ${path}x`), error.message)
  })

  it('MongoDB', { timeout: 90_000 }, async (t) => {
    if (!(await canStartServer(t, 'mongodb', locateMongod))) return
    const server = await startMongod({ socketFolder: dir })
    t.after(() => server.stop())
    const socket = join(dir, `mongodb-${server.port}.sock`)
    const locks = await LockService.connect(`mongodb://${encodeURIComponent(socket)}/holdfast`)
    t.after(() => locks.close())
    await assertWorks(locks)
    const missing = LockService.connect(`mongodb://${encodeURIComponent(`${socket}.sock`)}/`, { storeTimeoutMs: 1000 })
    const error = await rejects(missing, 'LOCK_STORE', { retryable: true })
    assert.ok(error.message.includes(`${socket}.sock`), error.message)
    // The driver's monitor would block the native thread: the socket refuses connections.
    await server.kill()
    await locks.close()
    const other = await LockService.connect('memory:')
    await assertWorks(other)
    await other.close()
  })
})

it('MongoDB: certificates as text', { timeout: 90_000 }, async (t) => {
  if (!(await canStartServer(t, 'mongodb', locateMongod))) return
  const dir = mkdtempSync(join(tmpdir(), 'holdfast-pem-'))
  t.after(() => rmSync(dir, { recursive: true, force: true }))
  const ca = readFileSync(await makeAuthority(dir), 'utf8')
  const server = await certify(dir, 'server')
  const { cert, key } = await certify(dir, 'client', { usage: 'clientAuth' })
  const files = ['--tlsCertificateKeyFile', server.both, '--tlsCAFile', join(dir, 'ca.crt')]
  const mongod = await startMongod({ args: ['--tlsMode', 'requireTLS', ...files] })
  t.after(() => mongod.stop())
  const text = { cert: readFileSync(cert, 'utf8'), key: readFileSync(key, 'utf8') }
  const indented = Object.fromEntries(
    Object.entries({ ca, ...text }).map(([name, pem]) => [name, pem.replace(/^/gm, '    ')]),
  )
  for (const tls of [{ ca, ...text }, indented]) {
    const locks = await LockService.connect(mongod.url, { tls })
    t.after(() => locks.close())
    await assertWorks(locks)
  }
  const folder = join(dir, 'tmp')
  mkdirSync(folder)
  const script = `
    import { readdirSync } from 'node:fs'
    import { LockService } from ${JSON.stringify(INDEX)}
    await LockService.connect('${mongod.url}', { tls: ${JSON.stringify({ ca, ...text })} })
    console.log(JSON.stringify(readdirSync(${JSON.stringify(folder)})))
    process.exit()`
  const env = { ...process.env, TMPDIR: folder }
  const { stdout } = await run(process.execPath, ['--input-type=module', '-e', script], { timeout: 60_000, env })
  assert.deepEqual([JSON.parse(stdout), readdirSync(folder)], [[], []], 'no file with a private key stays')
  /** @type {[tls: object, message: RegExp][]} */
  const wrong = [
    [{ ca: 'no PEM' }, /^tls\.ca must be the text of a PEM file .*, got text without a certificate$/],
    [{ ca, cert: text.cert }, /^tls\.keyFile must be set, .* has no private key, got only tls\.certFile or tls\.cert$/],
  ]
  for (const [tls, message] of wrong) {
    const error = await rejects(connectWith(mongod.url, { tls }), 'LOCK_INVALID_ARGUMENT')
    assert.match(error.message, message)
  }
})

/** The stores whose servers start late, or are down for a while. */
const STORES = {
  redis: { locate: locateRedis, start: startRedis },
  mongodb: { locate: locateMongod, start: startMongod },
}

for (const [kind, { locate, start }] of Object.entries(STORES)) {
  describe(`${kind}: a server that is not there`, { concurrency: 3 }, () => {
    const test = (name, body) =>
      it(name, { timeout: 90_000 }, async (t) => {
        if (!(await canStartServer(t, kind, locate))) return
        const server = await start()
        t.after(() => server.stop())
        const options = { keyPrefix: `${random()}:`, storeTimeoutMs: 2000 }
        await body(server, options, t)
      })

    test('connectMs: connect waits for a server that starts 2 s later', async (server, options) => {
      await server.kill()
      await rejects(LockService.connect(server.url, options), 'LOCK_STORE', { retryable: true })
      const connecting = LockService.connect(server.url, { ...options, connectMs: '60s' })
      await sleep(2000)
      await server.restart()
      const locks = await connecting
      await assertWorks(locks)
      await locks.close()
      await server.kill()
      const began = performance.now()
      const short = LockService.connect(server.url, { ...options, connectMs: 800 })
      await rejects(short, 'LOCK_STORE', { retryable: true })
      const took = performance.now() - began
      assert.ok(took >= 799, `the last attempt began before ${took} ms`)
    })

    test('lazy: the first call connects', async (server, options, t) => {
      await server.kill()
      const locks = await LockService.connect(server.url, { ...options, lazy: true })
      t.after(() => locks.close())
      assert.deepEqual(locks.stats().held, 0)
      await rejects(locks.tryAcquire('n'), 'LOCK_STORE', { retryable: true })
      await server.restart()
      await Promise.all([assertWorks(locks), assertWorks(locks)])
      assert.equal(locks.stats().acquired, 2)
      await locks.close()
      await rejects(locks.acquire('n'), 'LOCK_CLOSED')
      const reason = new Error('stopped')
      const slow = await LockService.connect(server.url, { ...options, lazy: true, connectMs: 60_000 })
      await server.kill()
      const aborted = slow.acquire('n', { signal: AbortSignal.abort(reason) })
      await assert.rejects(aborted, reason)
      const controller = new AbortController()
      const acquiring = slow.acquire('n', { signal: controller.signal, waitMs: 60_000 })
      controller.abort(reason)
      await assert.rejects(acquiring, reason)
      await server.restart()
      await slow.close()
      const unused = await LockService.connect(server.url, { ...options, lazy: true })
      await unused.close()
      await rejects(unused.acquire('n'), 'LOCK_CLOSED')
    })

    test('lazy: a close ends an attempt to connect, and the process', async (server, options) => {
      await server.kill()
      const script = `
        import { LockService } from ${JSON.stringify(INDEX)}
        const options = { lazy: true, connectMs: '10m', keyPrefix: 'p' }
        const locks = await LockService.connect(${JSON.stringify(server.url)}, options)
        const call = locks.acquire('n').catch((error) => console.log(error.code))
        setTimeout(() => locks.close(), 100)
        await call`
      const ended = await run(process.execPath, ['--input-type=module', '-e', script], { timeout: 60_000 })
      assert.equal(ended.stdout, 'LOCK_CLOSED\n')
      assert.ok(options)
    })

    test('onStoreError: calls wait through a stall, and keep what they are granted', async (server, options, t) => {
      const [ours, other] = await Promise.all([1, 2].map(() => LockService.connect(server.url, options)))
      t.after(() => Promise.all([ours.close(), other.close()]))
      await assertWorks(ours)
      await server.pause()
      /** @type {import('../index.js').AcquireOptions} */
      const forever = { waitMs: Infinity, onStoreError: 'wait' }
      // Longer than the repetition of a release in the background after 5 s.
      const checks = ['a', 'b', 'c'].map((name) =>
        ours.using(name, forever, async (lock) => {
          await sleep(6500)
          return lock.isHeld && (await other.inspect(name))?.fencingToken === lock.fencingToken
        }),
      )
      const served = [1, 2, 3, 4].map((n) => ours.using('same', forever, () => n))
      await sleep(6000)
      server.resume()
      assert.deepEqual(await Promise.all(checks), [true, true, true])
      assert.deepEqual((await Promise.all(served)).sort(), [1, 2, 3, 4])
    })

    test('lazy, onStoreError: a call waits for a server that is not there', async (server, options, t) => {
      await server.kill()
      const lazy = async (more = {}) => {
        const locks = await LockService.connect(server.url, { ...options, storeTimeoutMs: 500, lazy: true, ...more })
        t.after(() => locks.close())
        return locks
      }
      /** @type {import('../index.js').AcquireOptions} */
      const forever = { waitMs: Infinity, onStoreError: 'wait' }
      const locks = await lazy()
      const started = performance.now()
      await rejects(locks.acquire('n', { ...forever, waitMs: 3000 }), 'LOCK_STORE', { retryable: true })
      const took = performance.now() - started
      const sinceFirst = stopwatch()
      assert.ok(took >= 2990 && took < 20_000, `${took} ms`)
      const defaults = { waitMs: 3000, onStoreError: /** @type {const} */ ('wait') }
      const withDefaults = await lazy({ defaults })
      const waits = later(withDefaults.using('n', (lock) => lock.isHeld))
      await rejects(withDefaults.acquire('n', { onStoreError: 'fail' }), 'LOCK_STORE', { retryable: true })
      await rejects(withDefaults.tryAcquire('n'), 'LOCK_STORE', { retryable: true })
      assert.ok(sinceFirst() < 3000, `${sinceFirst()} ms`)
      await rejects(waits, 'LOCK_STORE', { retryable: true })

      const controller = new AbortController()
      const aborted = later(locks.acquire('n', { ...forever, signal: controller.signal }))
      const closed = await lazy()
      const ended = later(closed.acquire('n', forever))
      const served = [1, 2].map((n) => later(locks.using('n', { ...forever, waitMs: '1m' }, () => n)))
      await sleep(1500)
      const reason = new Error('stopped')
      controller.abort(reason)
      await assert.rejects(aborted, reason)
      await closed.close()
      await rejects(ended, 'LOCK_CLOSED')
      await server.restart()
      assert.deepEqual(await Promise.all(served), [1, 2])
    })

    test('onStoreError: a call waits through an outage of 8 s', async (server, options, t) => {
      const locks = await LockService.connect(server.url, options)
      t.after(() => locks.close())
      await assertWorks(locks)
      await server.kill()
      /** @type {import('../index.js').AcquireOptions} */
      const forever = { waitMs: Infinity, onStoreError: 'wait' }
      const waiting = [1, 2, 3].map(() => locks.using('n', forever, (lock) => lock.isHeld))
      let isOver = false
      Promise.allSettled(waiting).then(() => (isOver = true))
      await rejects(locks.acquire('n', { waitMs: Infinity }), 'LOCK_STORE', { retryable: true })
      // It rejects with the error of the store after waitMs.
      await rejects(locks.acquire('m', { waitMs: 3000, onStoreError: 'wait' }), 'LOCK_STORE', { retryable: true })
      await sleep(8000)
      assert.equal(isOver, false)
      await server.restart()
      assert.deepEqual(await Promise.all(waiting), [true, true, true])
    })
  })
}

it('lazy, onStoreError: a call that waits keeps the process alive, and an election with unref does not', async () => {
  const connected = `
    import { LockService } from ${JSON.stringify(INDEX)}
    const locks = await LockService.connect('redis://127.0.0.1:1', { lazy: true })`
  const call = `await locks.acquire('n', { waitMs: 1500, onStoreError: 'wait' }).catch(({ code }) => console.log(code))`
  assert.equal(await output(`${connected}\n${call}`), 'LOCK_STORE')
  assert.equal(await output(`${connected}\nlocks.elect('n', { unref: true }, () => {})`), '')
})

describe('HOLDFAST_DEBUG', () => {
  let port
  before(async () => void (port = await freePort()))

  it('prints what happens, one line each, without secrets', async () => {
    const script = `
      import { LockService } from ${JSON.stringify(INDEX)}
      const options = { connectMs: 1000, storeTimeoutMs: 500 }
      await LockService.connect('redis://user:hunter2@127.0.0.1:${port}', options).catch(() => {})
      const locks = await LockService.connect('memory:')
      await locks.close()`
    const start = (env) =>
      run(process.execPath, ['--input-type=module', '-e', script], { env: { ...process.env, ...env } })
    const { stderr, stdout } = await start({ HOLDFAST_DEBUG: '1' })
    assert.equal(stdout, '')
    const lines = stderr.trimEnd().split('\n')
    for (const line of lines) assert.match(line, /^holdfast \d+\.\d{3} (ERROR|WARN|DEBUG|INFO) holdfast::[\w:]+: /)
    assert.ok(
      lines.some((line) => /cannot connect yet error=.*127\.0\.0\.1/.test(line)),
      stderr,
    )
    assert.ok(
      lines.some((line) => line.includes('connected engine="memory"')),
      stderr,
    )
    assert.doesNotMatch(stderr, /hunter2/)
    assert.equal((await start({ HOLDFAST_DEBUG: '' })).stderr, '')
  })
})
