// holdfast beside other tools: `etcdctl lock`, which has the layout of Go's `concurrency.Mutex`, and stored keys of any form.
import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { locateEtcdctl } from '../scripts/etcd.mjs'
import { EtcdClient } from './etcd-client.mjs'
import { random, serverUrl, suite } from './stores.mjs'
import { assertFree, inspectHeld, rejects, until, waiting } from './tools.mjs'

/** Starts `etcdctl lock`, which holds a name until it is killed. `held` resolves to its key. */
async function etcdctlLock(t, name) {
  const args = ['--endpoints', new URL(String(serverUrl('etcd'))).host, 'lock', '--ttl', '5', name]
  const child = spawn(await locateEtcdctl(), args, { env: { ...process.env, ETCDCTL_API: '3' } })
  t.after(() => child.kill('SIGKILL'))
  let out = ''
  child.stdout.on('data', (data) => (out += data))
  const held = until('the lock of etcdctl', () => out.includes('\n') && out.trim(), 20_000)
  held.catch(() => {})
  const end = async (signal) => {
    child.kill(signal)
    await once(child, 'exit')
  }
  return { held, isHeld: () => out.includes('\n'), end }
}

const other = () => new EtcdClient(String(serverUrl('etcd')))
const queued = (name) => async () => (await other().list(`${name}/`)).length

suite('etcd', 'beside other tools', (test) => {
  test('etcdctl lock excludes holdfast, and its end is the grant of the waiter', async (store, t) => {
    store.options.keyPrefix = ''
    const name = `interop-${random()}`
    const locks = await store.connect()
    const tool = await etcdctlLock(t, name)
    assert.equal(String(await tool.held).startsWith(`${name}/`), true)
    assert.equal(await locks.tryAcquire(name), null)
    const { fencingToken, holder, metadata, waiting: behind } = await inspectHeld(locks, name)
    assert.deepEqual(
      { fencingToken, holder, metadata, behind },
      { fencingToken: null, holder: null, metadata: null, behind: 0 },
    )
    const wait = locks.acquire(name, { waitMs: 60_000 })
    await waiting(locks, 1)
    await tool.end('SIGINT')
    const lock = await wait
    assert.ok(lock.isHeld)
    assert.equal(await lock.release(), true)
    assert.equal(await queued(name)(), 0)
    // Of all names, as other tests have theirs.
    store.options.keyPrefix = `test:${random()}:`
  })

  test('holdfast excludes etcdctl lock, and a killed tool delays the waiter by its lease', async (store, t) => {
    store.options.keyPrefix = ''
    const name = `interop-${random()}`
    const locks = await store.connect()
    const first = await locks.acquire(name, { ttlMs: 10_000 })
    const tool = await etcdctlLock(t, name)
    await until('its entry', async () => (await queued(name)()) === 2)
    assert.equal((await inspectHeld(locks, name)).waiting, 1)
    const wait = locks.acquire(name, { waitMs: 60_000 })
    await until('our entry', async () => (await queued(name)()) === 3)
    assert.equal(tool.isHeld(), false)
    assert.equal(await first.release(), true)
    await tool.held
    assert.equal(await locks.tryAcquire(name), null, 'the tool came first')
    await tool.end('SIGKILL')
    const lock = await wait
    assert.ok(lock.fencingToken > first.fencingToken)
    assert.equal(await lock.release(), true)
    store.options.keyPrefix = `test:${random()}:`
  })

  test('etcdctl waits through a renewal and a transfer, in the order of arrival', async (store, t) => {
    store.options.keyPrefix = ''
    const name = `interop-${random()}`
    const [a, b] = await store.connectAll(2)
    const first = await a.acquire(name, { ttlMs: 6000 })
    const tool = await etcdctlLock(t, name)
    await until('its entry', async () => (await queued(name)()) === 2)
    const moved = await b.restore(first.transferable(), { ttlMs: 60_000 })
    await until('the loss', () => first.signal.aborted)
    assert.equal(tool.isHeld(), false)
    assert.equal(await moved.release(), true)
    await tool.held
    await tool.end('SIGINT')
    await assertFree(a, name)
    store.options.keyPrefix = `test:${random()}:`
  })

  test('an entry that another client deleted is a lost lock, and is not created again', async (store) => {
    const locks = await store.connect()
    const lock = await locks.acquire('n', { ttlMs: 4500 })
    const [entry] = await other().list(store.options.keyPrefix)
    await other().delete(entry.key)
    await until('the loss', () => lock.signal.aborted)
    assert.equal(await lock.release(), false)
    assert.deepEqual(await other().list(store.options.keyPrefix), [])
  })

  test('keys without a lease and with foreign values are locks of unknown holders', async (store) => {
    const locks = await store.connect()
    const { keyPrefix } = store.options
    for (const [name, value] of Object.entries({ empty: '', json: '{"ttl":"x"}', text: '\u0000\uffff' }))
      assert.ok(await other().put(`${keyPrefix}${name}/theirs`, value, 0))
    await other().put(`${keyPrefix}without-a-slash`, '', 0)
    await other().put(`${keyPrefix}%zz/x`, '', 0)
    const found = await locks.list()
    assert.deepEqual(
      found.map(({ name }) => name),
      ['empty', 'json', 'text'],
    )
    for (const { name, remainingMs, holder } of found) {
      assert.deepEqual([remainingMs, holder], [Infinity, null])
      assert.equal(await locks.acquireLock(name), false)
      await rejects(locks.acquire(name, { waitMs: 50 }), 'LOCK_TIMEOUT')
      assert.equal(await locks.forceRelease(name), true)
      await assertFree(locks, name)
    }
    await other().delete(keyPrefix, `${keyPrefix}~`)
  })

  test('the deletion of a lease ends its locks, and nothing is stored per name', async (store) => {
    const locks = await store.connect()
    for (let round = 0; round < 3; round++) {
      const held = await Promise.all(['a', 'b', 'c'].map((name) => locks.acquire(`${name}${round}`, { ttlMs: 5000 })))
      const leases = new Set((await other().list(store.options.keyPrefix)).map(({ lease }) => lease))
      assert.equal(leases.size, 1, 'one etcd lease for all')
      await other().call('kv/lease/revoke', { ID: [...leases][0] })
      await until('the losses', () => held.every((lock) => lock.signal.aborted))
    }
    assert.deepEqual(await other().list(store.options.keyPrefix), [])
  })
})
