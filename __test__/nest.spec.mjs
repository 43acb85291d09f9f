// `holdfast-nest` in real Nest applications over HTTP: two instances of one service.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { after, before, describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { startRedis } from '../scripts/servers.mjs'
import { commandOf } from '../scripts/setup.mjs'
import { assertGrowing, until, wrong } from './tools.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))
const folder = join(root, 'packages', 'nest')
const compile = (...args) =>
  execFileSync(process.execPath, [commandOf('typescript', 'tsc'), ...args], { cwd: folder, stdio: 'inherit' })

let redis, app, instances
before(async () => {
  // As in a project that has installed both.
  const own = join(folder, 'node_modules', 'holdfast')
  mkdirSync(dirname(own), { recursive: true })
  if (!existsSync(own)) symlinkSync(root, own, 'junction')
  compile('-p', 'tsconfig.test.json')
  app = createRequire(import.meta.url)(join(folder, 'node_modules', '.test', 'test', 'app.js'))
  redis = await startRedis()
  instances = await Promise.all([app.start(redis.url), app.start(redis.url, true)])
})
after(async () => {
  for (const { app } of instances ?? []) await app.close()
  await redis?.stop()
})

const request = async (instance, path, method = 'POST') => {
  const response = await fetch(instance.address + path, { method })
  assert.ok(response.ok, `${path}: ${response.status}`)
  return response.text()
}
const part = (instance, type) => instance.app.get(type)

describe('holdfast-nest', () => {
  test('@Locked: requests for one order run one after the other in all instances', async () => {
    const answers = await Promise.all(Array.from({ length: 20 }, (_, i) => request(instances[i % 2], '/orders/7')))
    assert.deepEqual([...new Set(answers)], ['7 is paid'])
    assert.equal(app.did.mostRunning, 1)
    assert.equal(app.did.tokens.length, 20)
    assertGrowing(app.did.tokens)
    await Promise.all(Array.from({ length: 20 }, (_, i) => request(instances[i % 2], `/orders/other-${i}`)))
    assert.ok(app.did.mostRunning > 1, 'other orders wait for each other')
  })

  test('@Locked on a controller, with several names, and in the scope of a request', async () => {
    assert.equal(await request(instances[0], '/locked/9'), '9 under direct:9')
    assert.equal(await request(instances[0], '/per-request', 'GET'), 'true')
    assert.deepEqual(await part(instances[1], app.Payments).holdsTwo(), ['a', 'b'])
  })

  test('@Locked with ifBusy: skip resolves to undefined while another instance runs the method', async () => {
    const first = part(instances[0], app.Payments).charge(300)
    await until('the lock', () => part(instances[1], app.Payments).locks.inspect('charge'))
    assert.equal(await part(instances[1], app.Payments).charge(0), undefined)
    assert.equal(await first, 'charged')
    assert.equal(app.did.charged, 1)
  })

  describe('semaphores and read/write locks', () => {
    // In memory: two instances of one process.
    /** @type {any[]} */
    let both
    before(async () => (both = await Promise.all(['', ''].map(() => app.start('memory:nest')))))
    after(() => Promise.all(both.map(({ app }) => app.close())))

    test('@Locked with limit: no more calls run at the same time, in all instances', async () => {
      app.did.mostRunning = 0
      const payments = both.map((instance) => part(instance, app.Payments))
      const calls = Array.from({ length: 20 }, (_, i) => payments[i % 2].ask('models'))
      assert.equal(await payments[0].askAlone('models'), undefined)
      assert.deepEqual([...new Set(await Promise.all(calls))], [1])
      assert.equal(app.did.mostRunning, 3)
      assert.equal(await payments[0].askAlone('models'), 3)
      await assert.rejects(payments[0].askWith(['a', 'b']), /@Locked: limit needs one name/)
    })

    test('@Locked with mode: readers run at the same time, a writer alone', async () => {
      const [one, two] = both.map((instance) => part(instance, app.Payments))
      const done = async () => 'done'
      const inside = await one.report(async () => [await two.report(done), await two.importAll(done)])
      assert.deepEqual(inside, ['done', undefined])
      assert.deepEqual(await one.importAll(() => two.report(done)), undefined)
      assert.equal(await two.importAll(done), 'done')
    })
  })

  test('@OncePer: the method runs once per period, and again at once after an error', async () => {
    const send = (instance) => part(instance, app.Reports).send()
    const results = await Promise.all(instances.map(send))
    assert.deepEqual(results.sort(), ['sent', undefined])
    assert.equal(await send(instances[0]), undefined)
    assert.equal(app.did.reports, 1)
    const [one, two] = instances.map((instance) => part(instance, app.Reports))
    await assert.rejects(one.sendFlaky('monday'), /the first instance fails/)
    assert.equal(await two.sendFlaky('monday'), 'sent')
    assert.equal(await one.sendFlaky('monday'), undefined)
  })

  test('a decorated method keeps its name, and the metadata of the decorators above and below', () => {
    const { described } = app.Payments.prototype
    assert.equal(described.name, 'described')
    assert.deepEqual(
      ['above', 'below'].map((key) => wrong(Reflect).getMetadata(key, described)),
      [1, 2],
    )
  })

  test('outside of Nest, errors say what is missing', async () => {
    await assert.rejects(new app.Payments(undefined).pay('1'), /Payments\.pay: no lock service was injected/)
    const { currentLock, Locked } = createRequire(join(folder, 'node_modules', '.test', 'test', 'app.js'))(
      '../src/index.js',
    )
    assert.throws(currentLock, /outside of a method/)
    assert.throws(() => Locked('x')({}, 'field', { value: 1 }), /@Locked must decorate a method of an instance: field/)
    assert.throws(() => Locked('x')(class {}, 'still', { value() {} }), /must decorate a method of an instance: still/)
    assert.throws(() => Locked('x', { ifBusy: 'Throw' }), /ifBusy must be 'throw' or 'skip', not Throw/)
    assert.throws(() => Locked('x', { mode: 'Read' }), /mode must be 'read' or 'write', not Read/)
    assert.throws(() => Locked('x', { mode: 'read', limit: 5 }), /limit and mode exclude each other/)
    assert.throws(() => Locked('x', { permits: 5 }), /permits needs limit/)
  })

  test('a method whose result is no promise is rejected', async () => {
    const payments = part(instances[0], app.Payments)
    await assert.rejects(payments.observable(), /observable must return a promise/)
    await assert.rejects(payments.generator(), /generator must return a promise/)
    assert.equal(await payments.locks.inspect('observable'), null)
  })

  test('a missing URL fails the start of the application', async () => {
    await assert.rejects(app.start(undefined), { code: 'LOCK_INVALID_ARGUMENT', message: /url/ })
    await assert.rejects(app.start('', true), { code: 'LOCK_INVALID_ARGUMENT', message: /url/ })
    // A factory without `return`: not the store of HOLDFAST_URL.
    await assert.rejects(app.startWith(undefined), TypeError)
  })

  test('an invalid drainMs rejects at the end, which closes the service', async () => {
    const instance = await app.start(redis.url, false, 'soon')
    const { locks } = part(instance, app.Payments)
    await assert.rejects(instance.app.close(), { code: 'LOCK_INVALID_ARGUMENT', message: /drainMs/ })
    await assert.rejects(locks.ping(), { code: 'LOCK_CLOSED' })
  })

  test('the health indicator is up, and down while the store does not answer', async () => {
    const health = async () => JSON.parse(await request(instances[0], '/health', 'GET')).locks
    assert.equal((await health()).status, 'up')
    assert.ok((await health()).pingMs > 0)
    await redis.pause()
    const { status, message } = await health()
    await redis.resume()
    assert.equal(status, 'down')
    assert.match(message, /no answer within 5000 ms/)
    await until('up', async () => (await health()).status === 'up')
  })

  test('the end of the application drains: a job finishes under its lock, which is then free', async () => {
    const instance = await app.start(redis.url)
    const { charged } = app.did
    const job = part(instance, app.Payments).charge(400)
    const watcher = part(instances[0], app.Payments).locks
    // `inspect` of another service may show the lock before its own service has the reply.
    await until('the lock', () => part(instance, app.Payments).locks.stats().held === 1)
    await instance.app.close()
    assert.equal(app.did.charged, charged + 1)
    assert.equal(await job, 'charged')
    assert.equal(await watcher.inspect('charge'), null)
    assert.equal(part(instance, app.Payments).locks.stats().held, 0)
  })

  test('a global module that is imported before is closed after the drain', async () => {
    assert.deepEqual(await app.endWithDatabase(), ['job', 'database'])
  })

  test('a store that cannot be reached fails the start of the application', async () => {
    await assert.rejects(app.start('redis://127.0.0.1:1'), { code: 'LOCK_STORE' })
  })

  test('the committed files are those of the source: `npm run build` in packages/nest', () => {
    const built = mkdtempSync(join(tmpdir(), 'holdfast-nest-'))
    try {
      compile('-p', 'tsconfig.json', '--outDir', built)
      for (const file of ['index.js', 'index.d.ts'])
        assert.equal(readFileSync(join(folder, file), 'utf8'), readFileSync(join(built, file), 'utf8'), file)
    } finally {
      rmSync(built, { recursive: true, force: true })
    }
  })
})
