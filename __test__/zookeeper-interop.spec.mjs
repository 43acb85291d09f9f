// Locks of Curator's `InterProcessMutex` and of holdfast exclude each other, and their waiters are in one queue.
import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import { locateCurator } from '../scripts/zookeeper.mjs'
import { canStartServer, serverUrl, suite } from './stores.mjs'
import { until } from './tools.mjs'
import { entriesOf, folderOf, withZookeeper } from './zookeeper-client.mjs'

const SOURCE = fileURLToPath(new URL('zookeeper/CuratorLock.java', import.meta.url))

/** Starts a process with Curator. `send` sends a command, and `next` resolves to the next result. @param {import('node:test').TestContext} t */
async function startCurator(t) {
  const child = spawn(await locateCurator(), [SOURCE, String(serverUrl('zookeeper')).replace('zookeeper://', '')], {
    stdio: ['pipe', 'pipe', 'ignore'],
  })
  t.after(() => child.kill('SIGKILL'))
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]()
  const curator = {
    child,
    send: (/** @type {string} */ command) => void child.stdin.write(`${command}\n`),
    next: async () => (await lines.next()).value,
  }
  assert.equal(await curator.next(), 'ready')
  return curator
}

suite('zookeeper', 'Curator', (test) => {
  test('a lock of Curator is busy here, and a lock of holdfast is busy there', async (store, t) => {
    if (!(await canStartServer(t, 'zookeeper', locateCurator))) return
    const curator = await startCurator(t)
    const locks = await store.connect()
    const path = `/${folderOf(`${store.options.keyPrefix}n`)}`
    curator.send(`acquire ${path} 20000`)
    assert.equal(await curator.next(), 'acquired')
    assert.equal(await locks.tryAcquire('n'), null)
    const info = await locks.inspect('n')
    assert.deepEqual([info?.holder, info?.fencingToken, info?.remainingMs], [null, null, Infinity])
    const waiting = locks.acquire('n', { waitMs: 20_000 })
    await until('the call waits', async () => (await locks.inspect('n'))?.waiting === 1)
    curator.send(`release ${path}`)
    assert.equal(await curator.next(), 'released')
    const lock = await waiting
    curator.send(`acquire ${path} 300`)
    assert.equal(await curator.next(), 'busy')
    curator.send(`acquire ${path} 20000`)
    const entries = () => withZookeeper(String(store.target), (client) => entriesOf(client, path))
    await until('Curator waits', async () => (await entries()).length === 2)
    const behind = locks.acquire('n', { waitMs: 20_000 })
    await until('the call waits behind it', async () => (await entries()).length === 3)
    assert.equal(await lock.release(), true)
    assert.equal(await curator.next(), 'acquired')
    assert.equal((await locks.inspect('n'))?.waiting, 1)
    curator.send(`release ${path}`)
    assert.equal(await curator.next(), 'released')
    const last = await behind
    assert.ok(last.fencingToken > lock.fencingToken)
    assert.equal(await last.release(), true)
  })

  test('a name that minHoldMs keeps busy is busy for Curator, too', async (store, t) => {
    if (!(await canStartServer(t, 'zookeeper', locateCurator))) return
    const curator = await startCurator(t)
    const locks = await store.connect()
    const path = `/${folderOf(`${store.options.keyPrefix}n`)}`
    const began = performance.now()
    await (await locks.acquire('n', { minHoldMs: 2500 })).release()
    curator.send(`acquire ${path} 100`)
    const first = await curator.next()
    if (performance.now() - began < 2400) assert.equal(first, 'busy')
    if (first === 'busy') {
      curator.send(`acquire ${path} 20000`)
      assert.equal(await curator.next(), 'acquired')
    }
    assert.ok(performance.now() - began >= 2490, 'acquired too early')
    assert.equal((await locks.inspect('n'))?.holder, null)
    curator.send(`release ${path}`)
    assert.equal(await curator.next(), 'released')
  })

  test('forceRelease ends a lock of Curator', async (store, t) => {
    if (!(await canStartServer(t, 'zookeeper', locateCurator))) return
    const curator = await startCurator(t)
    const locks = await store.connect()
    const path = `/${folderOf(`${store.options.keyPrefix}n`)}`
    curator.send(`acquire ${path} 20000`)
    assert.equal(await curator.next(), 'acquired')
    assert.equal(await locks.forceRelease('n'), true)
    await (await locks.acquire('n', { waitMs: 0 })).release()
  })
})
