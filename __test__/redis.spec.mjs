import assert from 'node:assert/strict'
import { after } from 'node:test'
import { contract } from './contract.mjs'
import { openRedis } from './redis-client.mjs'
import { serverUrl, suite } from './stores.mjs'
import { assertFree, inspectHeld, rejects, SOON_MS, timed, until, waiting } from './tools.mjs'

contract('redis')

let redis
after(() => redis?.disconnect())

/** Executes a command of another tool. */
async function command(...words) {
  redis ??= openRedis(serverUrl('redis'))
  return redis.call(...words)
}

suite('redis', 'with other tools', (test) => {
  test('the key holds only the owner token, as with SET NX PX', async (store) => {
    const a = await store.connect()
    const lock = await a.acquire('shared', { ttlMs: 20_000, metadata: 'stored in another key' })
    const key = `${store.options.keyPrefix}shared`
    assert.equal(await command('GET', key), lock.token)
    const ttl = Number(await command('PTTL', key))
    assert.ok(ttl > 10_000 && ttl <= 20_000, `${ttl} ms`)
    assert.equal(await command('SET', key, 'theirs', 'NX', 'PX', 1000), null)
    assert.equal(await lock.release(), true)
    assert.equal(await command('EXISTS', key), 0)
  })

  test('the default keyPrefix is lock:, and it may be empty', async (store) => {
    const name = store.options.keyPrefix
    store.options = {}
    const a = await store.connect()
    const lock = await a.acquire(name)
    assert.equal(await command('GET', `lock:${name}`), lock.token)
    const bare = await store.connect({ keyPrefix: '' })
    const other = await bare.acquire(name)
    assert.equal(await command('GET', name), other.token)
    assert.deepEqual(
      (await bare.list({ prefix: name })).map((info) => info.name),
      [name],
    )
    assert.deepEqual([await lock.release(), await other.release()], [true, true])
    // Other locks under the default prefix do not belong to this test.
    store.options = { keyPrefix: name }
  })

  test('another tool’s lock excludes holdfast, and inspect and list return it', async (store) => {
    const a = await store.connect()
    const key = (name) => `${store.options.keyPrefix}${name}`
    assert.equal(await command('SET', key('theirs'), 'token', 'NX', 'PX', 60_000), 'OK')
    assert.equal(await command('SET', key('endless'), 'token', 'NX'), 'OK')
    assert.equal(await a.acquireLock('theirs'), false)
    await rejects(a.acquire(['free', 'endless'], { waitMs: 50 }), 'LOCK_TIMEOUT')
    // Its position is removed in the background.
    await until('no waiting call', async () => !(await inspectHeld(a, 'endless')).waiting)
    const [forEver, theirs] = await a.list()
    const stranger = { fencingToken: null, holder: null, metadata: null, waiting: store.ordered ? 0 : null }
    assert.deepEqual(forEver, { name: 'endless', remainingMs: Infinity, ...stranger })
    assert.deepEqual({ ...theirs, remainingMs: 0 }, { name: 'theirs', remainingMs: 0, ...stranger })
    assert.ok(theirs.remainingMs > 30_000)
    assert.equal(await a.releaseLock('theirs'), false)
    assert.equal(await command('GET', key('theirs')), 'token')
    assert.equal(await a.forceRelease('endless'), true)
    await command('DEL', key('theirs'))
    await assertFree(a, 'theirs')
  })

  test('a waiter is granted the name when another tool’s lock expires', async (store) => {
    const a = await store.connect()
    await command('SET', `${store.options.keyPrefix}n`, 'token', 'NX', 'PX', 4500)
    const wait = a.acquire('n', { waitMs: 60_000 })
    await waiting(a, 1)
    const took = await timed(wait)
    assert.ok(took < 4500 + SOON_MS, `after ${took} ms`)
    assert.equal(await (await wait).release(), true)
  })

  test('a lock that another tool deleted is lost, and is not created again', async (store) => {
    const a = await store.connect()
    const lock = await a.acquire('n', { ttlMs: 900 })
    const key = `${store.options.keyPrefix}n`
    await command('DEL', key)
    await command('SET', key, 'theirs', 'PX', 60_000)
    await until('the loss', () => lock.signal.aborted)
    assert.equal(await lock.release(), false)
    assert.equal(await command('GET', key), 'theirs')
    await command('DEL', key)
  })

  test('calls succeed after SCRIPT FLUSH', async (store) => {
    const a = await store.connect()
    for (let round = 0; round < 3; round++) {
      const lock = await a.acquire(['n', 'm'], { metadata: round })
      await command('SCRIPT', 'FLUSH')
      await lock.extend(60_000)
      await command('SCRIPT', 'FLUSH')
      assert.equal((await a.inspect('n')).metadata, round)
      await command('SCRIPT', 'FLUSH')
      assert.equal(await lock.release(), true)
      await command('SCRIPT', 'FLUSH')
    }
    assert.equal(a.stats().storeErrors, 0)
  })
})
