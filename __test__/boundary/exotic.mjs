// Unusual arguments: getters, proxies, classes, other realms.
import assert from 'node:assert/strict'
import { runInNewContext } from 'node:vm'
import { LockService } from '../../index.js'
import { rejection, rejects } from '../tools.mjs'

const thrown = new Error('from a getter')
const fail = () => {
  throw thrown
}
const throwing = (name) => Object.defineProperty({}, name, { get: fail, enumerable: true })

export function exotic(test) {
  test('a getter that throws rejects the call with what it threw', async (place) => {
    const a = await place.connect()
    const json = (await a.acquire('held', { renew: false })).transferable()
    const never = () => assert.fail('fn was called')
    const acquire = ['ttlMs', 'waitMs', 'renew', 'signal', 'maxHoldMs', 'stallLimitMs', 'minHoldMs', 'metadata']
    for (const name of acquire) {
      assert.equal(await rejection(a.acquire('x', throwing(name))), thrown, name)
      assert.equal(await rejection(a.tryAcquire('x', throwing(name))), thrown, name)
      assert.equal(await rejection(a.using('x', throwing(name), never)), thrown, name)
    }
    for (const name of ['name', 'ttlSeconds', 'waitMs', 'renew', 'minHoldMs', 'signal']) {
      const options = Object.defineProperty({ name: 'x' }, name, { get: fail, enumerable: true })
      assert.equal(await rejection(a.acquireAndExecute(options, never)), thrown, name)
    }
    for (const name of ['names', 'token', 'fencingToken', 'ttlMs', 'renew', 'metadata']) {
      const broken = Object.defineProperty({ ...json }, name, { get: fail, enumerable: true })
      assert.equal(await rejection(a.restore(broken)), thrown, name)
    }
    assert.equal(await rejection(a.list(throwing('prefix'))), thrown)
    const connect = ['keyPrefix', 'collection', 'table', 'storeTimeoutMs', 'minReplicas', 'defaults', 'tls', 'onEvent']
    for (const name of connect) {
      assert.equal(await rejection(LockService.connect(place.target, throwing(name))), thrown, name)
    }
    for (const name of ['url', ...connect]) {
      const options = Object.defineProperty({ url: place.target }, name, { get: fail, enumerable: true })
      assert.equal(await rejection(LockService.connect(options)), thrown, name)
    }
    for (const name of ['ttlMs', 'waitMs', 'renew', 'maxHoldMs', 'stallLimitMs', 'minHoldMs']) {
      assert.equal(await rejection(LockService.connect(place.target, { defaults: throwing(name) })), thrown, name)
    }
    assert.equal(await rejection(LockService.connect(place.target, { tls: throwing('caFile') })), thrown)
    assert.equal(await rejection(a.acquire(Object.defineProperty(['x'], 0, { get: fail }))), thrown)
    assert.deepEqual(
      (await a.list()).map((info) => info.name),
      ['held'],
    )
  })

  test('metadata may have a toJSON method', async (place) => {
    const a = await place.connect()
    const error = await rejection(a.acquire('x', { metadata: { toJSON: fail } }))
    assert.ok(error === thrown || (error.code === 'LOCK_INVALID_ARGUMENT' && error.cause === thrown))
    const lock = await a.acquire('x', { metadata: { toJSON: () => ({ own: 'form' }) } })
    assert.deepEqual((await a.inspect('x')).metadata, { own: 'form' })
    await lock.release()
  })

  test('options may be proxies, class instances, frozen, without a prototype, or of another realm', async (place) => {
    const a = await place.connect()
    class Options {
      get ttlMs() {
        return 5000
      }
    }
    const kinds = [
      new Proxy({ ttlMs: 5000 }, {}),
      new Options(),
      Object.assign(Object.create(null), { ttlMs: 5000 }),
      Object.freeze({ ttlMs: 5000 }),
      runInNewContext('({ ttlMs: 5000 })'),
      { ttlMs: 5000, waitMs: undefined, [Symbol('own')]: 1 },
    ]
    for (const options of kinds) {
      const lock = await a.acquire('x', options)
      assert.equal(lock.transferable().ttlMs, 5000)
      assert.equal(await lock.release(), true)
    }
    for (const names of [runInNewContext('["x"]'), new (class extends Array {})('x'), Object.freeze(['x'])]) {
      assert.equal(await (await a.acquire(names)).release(), true)
    }
  })

  test('a target may be a URL object', async (place) => {
    const a = await place.connect()
    const lock = await a.acquire('x')
    const url = new URL(place.target)
    /** @type {[any, any?][]} */
    const calls = [[url], [[url]], [{ url }], [{ url: [url] }], [url, { storeTimeoutMs: 5000 }], [[place.target]]]
    for (const args of calls) {
      const b = await LockService.connect(...args)
      assert.equal((await b.inspect('x'))?.fencingToken, lock.fencingToken)
      await b.close()
    }
    assert.equal(await lock.release(), true)
  })

  test('a proxy whose traps throw rejects the call with what they threw', async (place) => {
    const a = await place.connect()
    for (const trap of ['ownKeys', 'get', 'getOwnPropertyDescriptor']) {
      const options = new Proxy({ ttlMs: 5000 }, { [trap]: fail })
      assert.equal(await rejection(a.acquire('x', options)), thrown, trap)
    }
    const { proxy, revoke } = Proxy.revocable({}, {})
    revoke()
    assert.ok((await rejection(a.acquire('x', proxy))) instanceof TypeError)
    assert.ok((await rejection(a.acquire('x', { signal: proxy }))) instanceof TypeError)
    assert.ok((await rejection(a.restore(proxy))) instanceof TypeError)
  })

  test('an argument is read once, before the call returns', async (place) => {
    const a = await place.connect()
    const reads = []
    const options = new Proxy(
      { ttlMs: 5000, renew: false },
      {
        get(target, name) {
          reads.push(name)
          return target[name]
        },
      },
    )
    const call = a.acquire('x', options)
    const during = [...reads]
    const lock = await call
    assert.deepEqual(reads, during, 'read after the call returned')
    assert.equal(new Set(reads).size, reads.length, `read twice: ${reads.map(String)}`)
    await lock.release()
  })

  test('the caller may change its array and options afterwards', async (place) => {
    const a = await place.connect()
    const [names, options] = [['x', 'y'], { metadata: { list: [1] }, ttlMs: 5000 }]
    const call = a.acquire(names, options)
    names.length = 0
    options.metadata.list.push(2)
    options.ttlMs = 1
    const lock = await call
    assert.deepEqual(lock.names, ['x', 'y'])
    lock.names.push('z')
    assert.deepEqual(lock.names, ['x', 'y'])
    assert.deepEqual((await a.inspect('y')).metadata, { list: [1] })
    assert.equal(await lock.release(), true)
  })

  test('a getter may call the service', async (place) => {
    const a = await place.connect()
    let inner
    const options = {
      get ttlMs() {
        inner = a.acquire('inner')
        return 5000
      },
    }
    const lock = await a.acquire('outer', options)
    assert.deepEqual([await lock.release(), await (await inner).release()], [true, true])
  })

  test('a getter may close the service', async (place) => {
    const a = await place.connect()
    let closing
    const options = {
      get ttlMs() {
        closing = a.close()
        return 5000
      },
    }
    await rejects(a.acquire('late', options), 'LOCK_CLOSED')
    await closing
  })
}
