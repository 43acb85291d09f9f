import assert from 'node:assert/strict'
import net from 'node:net'
import { contract } from './contract.mjs'
import { serverUrl, suite } from './stores.mjs'
import { assertFree, rejects, SOON_MS, timed, until, waiting } from './tools.mjs'

contract('redis')

/** One command by another tool, which knows nothing of holdfast. */
function command(...words) {
  const { hostname, port } = new URL(serverUrl('redis'))
  const bulk = (word) => `$${Buffer.byteLength(`${word}`)}\r\n${word}\r\n`
  const request = `*${words.length}\r\n${words.map(bulk).join('')}`
  return new Promise((resolve, reject) => {
    const socket = net.connect({ host: hostname, port: Number(port || 6379) })
    socket.once('error', reject)
    // The answers that are asked for here fit into one packet.
    socket.once('data', (data) => {
      socket.destroy()
      const [first, second] = data.toString().split('\r\n')
      if (first[0] === '-') reject(new Error(first))
      else resolve(first[0] === '$' ? (first === '$-1' ? null : second) : first.slice(1))
    })
    socket.write(request)
  })
}

suite('redis', 'beside other tools', (test) => {
  test('the key holds the token and nothing else, as with SET NX PX', async (store) => {
    const a = await store.connect()
    const lock = await a.acquire('shared', { ttlMs: 20_000, metadata: 'kept elsewhere' })
    const key = `${store.options.keyPrefix}shared`
    assert.equal(await command('GET', key), lock.token)
    const ttl = Number(await command('PTTL', key))
    assert.ok(ttl > 10_000 && ttl <= 20_000, `${ttl} ms`)
    assert.equal(await command('SET', key, 'theirs', 'NX', 'PX', 1000), null)
    assert.equal(await lock.release(), true)
    assert.equal(await command('EXISTS', key), '0')
  })

  test('the key prefix is lock: unless told otherwise, and may be empty', async (store) => {
    const name = store.options.keyPrefix
    store.options = {}
    const a = await store.connect()
    const lock = await a.acquire(name)
    assert.equal(await command('GET', `lock:${name}`), lock.token)
    const bare = await store.connect({ keyPrefix: '' })
    const other = await bare.acquire(name)
    assert.equal(await command('GET', name), other.token)
    assert.deepEqual((await bare.list({ prefix: name })).map((info) => info.name), [name])
    assert.deepEqual([await lock.release(), await other.release()], [true, true])
    // What others keep under the default prefix is not this test's business.
    store.options = { keyPrefix: name }
  })

  test('another tool’s lock excludes ours, and is shown', async (store) => {
    const a = await store.connect()
    const key = (name) => `${store.options.keyPrefix}${name}`
    assert.equal(await command('SET', key('theirs'), 'token', 'NX', 'PX', 60_000), 'OK')
    assert.equal(await command('SET', key('for ever'), 'token', 'NX'), 'OK')
    assert.equal(await a.acquireLock('theirs'), false)
    await rejects(a.acquire(['free', 'for ever'], { waitMs: 50 }), 'LOCK_TIMEOUT')
    const [forEver, theirs] = await a.list()
    const stranger = { fencingToken: null, holder: null, metadata: null }
    assert.deepEqual(forEver, { name: 'for ever', remainingMs: Infinity, ...stranger })
    assert.deepEqual({ ...theirs, remainingMs: 0 }, { name: 'theirs', remainingMs: 0, ...stranger })
    assert.ok(theirs.remainingMs > 30_000)
    assert.equal(await a.releaseLock('theirs'), false)
    assert.equal(await command('GET', key('theirs')), 'token')
    assert.equal(await a.forceRelease('for ever'), true)
    await command('DEL', key('theirs'))
    await assertFree(a, 'theirs')
  })

  test('a waiter takes over when another tool’s lock expires', async (store) => {
    const a = await store.connect()
    await command('SET', `${store.options.keyPrefix}n`, 'token', 'NX', 'PX', 400)
    const wait = a.acquire('n', { waitMs: 60_000 })
    await waiting(a, 1)
    const took = await timed(wait)
    assert.ok(took < 400 + SOON_MS, `after ${took} ms`)
    assert.equal(await (await wait).release(), true)
  })

  test('a lock that another tool deleted is lost, and is not made again', async (store) => {
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

  test('a flushed script cache is no matter', async (store) => {
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
