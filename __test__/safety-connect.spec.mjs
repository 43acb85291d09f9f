// No silent local store: a target that is missing by mistake is rejected, and the embedded store warns in production.
import assert from 'node:assert/strict'
import { mkdtempSync, rmSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { it } from 'node:test'
import { inspect } from 'node:util'
import { LockService } from '../index.js'
import { INDEX, rejects, runNode } from './tools.mjs'

/** Runs code that may open the embedded store, in a state folder of its own. */
async function inFolder(code, env) {
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-state-'))
  try {
    const own = { XDG_STATE_HOME: folder, HOME: folder, LOCALAPPDATA: folder, HOLDFAST_URL: undefined }
    const { code: status, stdout, stderr } = await runNode(code, { env: { ...own, ...env } })
    assert.equal(status, 0, stderr)
    return { stdout: stdout.trim(), stderr }
  } finally {
    rmSync(folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 })
  }
}

it('a target that is present but missing names the argument and HOLDFAST_URL', async () => {
  const calls = [
    ['target', undefined],
    ['target', null],
    ['target', ''],
    ['target', undefined, { keyPrefix: 'p' }],
    ['url', { url: undefined }],
    ['url', { url: null }],
    ['url', { url: '', keyPrefix: 'p' }],
    ['host', { host: undefined }],
    ['host', { host: undefined, port: 6379, tls: {} }],
  ]
  for (const [argument, ...given] of calls) {
    const connect = /** @type {(...given: any[]) => Promise<any>} */ (LockService.connect)
    const { message } = await rejects(connect(...given), 'LOCK_INVALID_ARGUMENT', { retryable: false })
    assert.ok(message.startsWith(`${argument} must not be empty`), message)
    assert.match(message, /HOLDFAST_URL/)
  }
})

it('tls and a login without a server are rejected', async () => {
  for (const argument of ['tls', 'password']) {
    const { message } = await rejects(
      LockService.connect({ [argument]: argument === 'tls' ? {} : 'p' }),
      'LOCK_INVALID_ARGUMENT',
    )
    assert.ok(message.startsWith(`${argument} must be absent without a URL or a host`), message)
  }
})

it('no message shows a secret', async () => {
  const url = 'redis://h:6379'
  const pem = '-----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY-----'
  for (const options of [
    { host: 'redis://:secret@h:6379' },
    { url, host: ':secret@h' },
    { url, password: 4815162342 },
    { url, password: ['secret'] },
    { url, credentials: 'secret' },
    ...['caFile', 'certFile', 'keyFile'].map((file) => ({ url, tls: { [file]: pem } })),
  ]) {
    const { message } = await rejects(LockService.connect(/** @type {any} */ (options)), 'LOCK_INVALID_ARGUMENT')
    assert.doesNotMatch(message, /secret|4815162342/)
  }
})

it('an empty HOLDFAST_URL is rejected, and an absent one selects the embedded store', async () => {
  const code = `
    import { LockService } from '${INDEX}'
    for (const given of [[], [{ keyPrefix: 'p' }]]) {
      const locks = await LockService.connect(...given).catch((error) => error)
      console.log(locks.code ?? (await locks.using('n', () => 'connected')), locks.message ?? '')
      await locks.close?.()
    }`
  const { stdout } = await inFolder(code, { HOLDFAST_URL: '' })
  assert.match(stdout, /^LOCK_INVALID_ARGUMENT HOLDFAST_URL must not be empty.*\nLOCK_INVALID_ARGUMENT HOLDFAST_URL/)
  assert.match((await inFolder(code, {})).stdout, /^connected *\nconnected *$/)
})

it('the embedded store emits one warning with a code in production', async () => {
  const code = `
    import { LockService } from '${INDEX}'
    process.on('warning', ({ name, code, message }) => console.log(name, code, message))
    const services = [await LockService.connect(), await LockService.connect({ keyPrefix: 'p' })]
    services.push(await LockService.connect('memory:'))
    await new Promise(setImmediate)
    await Promise.all(services.map((service) => service.close()))`
  const { stdout } = await inFolder(code, { NODE_ENV: 'production' })
  assert.match(stdout, /^HoldfastWarning HOLDFAST_EMBEDDED_STORE .*HOLDFAST_URL/)
  assert.equal(stdout.split('\n').length, 1, stdout)
  for (const env of [{ NODE_ENV: 'development' }, { NODE_ENV: 'production', HOLDFAST_URL: 'memory:' }]) {
    assert.equal((await inFolder(code, env)).stdout, '')
  }
})

it('console.log of a service shows the store without secrets, and what is held', async () => {
  const locks = await LockService.connect('memory:shown')
  const lock = await locks.acquire('n')
  assert.equal(inspect(locks), "{ connectedTo: 'memory:shown', held: 1, waiting: 0 }")
  assert.match(inspect(locks.withPrefix('p:')), /connectedTo: 'memory:shown', prefix: 'p:'/)
  await lock.release()
  await locks.close()
  const { shownUrls } = createRequire(import.meta.url)('../dist/index.js')
  for (const [url, shown] of [
    ['redis://user:secret@host:6379/3?protocol=secret', 'redis://host:6379/3'],
    ['rediss://:secret@h#secret', 'rediss://h'],
    ['redis+sentinel://user:secret@h1,h2:5/m', 'redis+sentinel://h1,h2:5/m'],
    ['mongodb://user:se%40cret@h1,h2/db?tlsCertificateKeyFilePassword=secret@x', 'mongodb://h1,h2/db'],
    ['mongodb+srv://user:se@cret@host', 'mongodb+srv://host'],
    ['redis://:sec/ret@h:1', 'redis://h:1'],
    ['redis://:sec?ret@h', 'redis://…'],
    ['user:secret@h:1', '…'],
    ['sqlite:/var/a@b.sqlite', 'sqlite:/var/a@b.sqlite'],
    ['redis+unix:///run/redis.sock?db=1&pass=secret', 'redis+unix:///run/redis.sock'],
  ]) {
    assert.equal(shownUrls([url]), shown)
  }
  assert.equal(shownUrls(['redis://:secret@a', 'redis://b', 'redis://c']), 'redis://a, redis://b, redis://c')
  assert.match(shownUrls([]), /embedded/)
})
