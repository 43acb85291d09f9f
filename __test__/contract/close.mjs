// close: releases held locks, rejects waiting calls, and makes later calls reject.
import assert from 'node:assert/strict'
import { skip } from '../stores.mjs'
import { assertFree, INDEX, output, rejection, rejects, sleep, SOON_MS, timed, waiting } from '../tools.mjs'

/** Drops services, in a process of its own: their connections are file descriptors there. */
const DROPS = `
  import assert from 'node:assert/strict'
  import { readdirSync, readlinkSync } from 'node:fs'
  import { setTimeout as sleep } from 'node:timers/promises'
  import { LockService } from '${INDEX}'
  const [url, options] = JSON.parse(process.argv[1])
  const connect = (more) => LockService.connect(url, { ...options, ...more })
  const warnings = []
  process.on('warning', ({ code }) => warnings.push(code))
  const target = (fd) => {
    try {
      return readlinkSync('/proc/self/fd/' + fd)
    } catch {
      return ''
    }
  }
  const connections = () => readdirSync('/proc/self/fd').filter((fd) => /^socket:|sqlite/.test(target(fd))).length
  const untilClosed = async (count) => {
    for (const end = Date.now() + 30_000; connections() > count; await sleep(50)) {
      gc()
      assert.ok(Date.now() < end, connections() + ' connections, not ' + count)
    }
  }
  const first = await connect()
  await first.using('n', () => {})
  await first.close()
  await sleep(500)
  const before = connections()

  async function open() {
    const services = await Promise.all([connect(), connect({ lazy: true }), connect({ lazy: true })])
    await Promise.all(services.slice(0, 2).map((locks) => locks.using('n', { waitMs: 60_000 }, () => {})))
    if (!url.startsWith?.('memory:')) assert.ok(connections() > before + 1, connections() + ' connections')
  }
  await open()
  await untilClosed(before)

  async function use() {
    const lock = await (await connect()).acquire('held')
    const waits = (await connect()).using('held', { waitMs: Infinity }, (lock) => lock.isHeld)
    const view = (await connect()).withPrefix('v:')
    const watched = (await connect()).watch('held', { intervalMs: 100 })
    await watched.next()
    const controller = new AbortController()
    const { done } = (await connect()).elect('leader', { signal: controller.signal }, ({ signal }) => {
      return new Promise((resolve) => signal.addEventListener('abort', resolve))
    })
    const other = await connect()
    while ((await other.inspect('leader')) === null) await sleep(20)
    const change = watched.next()
    for (let i = 0; i < 25; i++) {
      gc()
      await sleep(100)
    }
    assert.equal(lock.isHeld, true)
    assert.ok(await other.inspect('leader'))
    assert.ok((await view.ping()) > 0)
    assert.equal(await lock.release(), true)
    assert.equal(await waits, true)
    await change
    controller.abort()
    await done
    await watched.return()
    await other.close()
    await view.inspect('last use')
  }
  await use()
  await untilClosed(before)
  console.log(warnings.join())`

export function close(test) {
  test('close releases held locks and aborts their signals', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('held')
    const set = await a.acquire(['s1', 's2'], { renew: false })
    const { signal } = lock
    assert.equal(await a.acquireLock('gist', 60), true)
    assert.equal(await a.close(), undefined)
    assert.deepEqual(await b.list(), [])
    assert.deepEqual([lock.isHeld, set.isHeld], [false, false])
    // The holder did not release the lock: it is lost.
    assert.equal(signal.aborted, true)
    assert.equal(signal.reason.code, 'LOCK_LOST')
    assert.match(signal.reason.message, /closed/)
    assert.equal(await lock.release(), false)
    assert.equal(await lock[Symbol.asyncDispose](), undefined)
    await rejects(lock.extend(60_000), 'LOCK_CLOSED')
    assert.equal(a.stats().held, 0)
    assert.equal(a.stats().released, 3)
  })

  test('close is idempotent, also when called concurrently', async (store) => {
    const [a, b] = await store.connectAll(2)
    await a.acquire('held')
    const answers = await Promise.all([a.close(), a.close(), a.close()])
    assert.deepEqual(answers, [undefined, undefined, undefined])
    assert.deepEqual(await b.list(), [])
    assert.equal(await a.close(), undefined)
  })

  test('close rejects waiting calls with LOCK_CLOSED', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const lock = await a.acquire('busy')
    const never = () => assert.fail('fn was called')
    const calls = [
      b.acquire('busy', { waitMs: Infinity }),
      b.acquire(['free', 'busy']),
      b.using('busy', never),
      b.acquireAndExecute({ name: 'busy', waitMs: 60_000 }, never),
    ].map((call) => rejects(call, 'LOCK_CLOSED'))
    await waiting(b, 4)
    await b.close()
    await Promise.all(calls)
    await lock.release()
    await assertFree(c, 'busy')
    await assertFree(c, 'free')
  })

  test('after close every call rejects with LOCK_CLOSED', async (store) => {
    const [a, b] = await store.connectAll(2)
    const json = (await b.acquire('theirs', { renew: false })).transferable()
    await a.close()
    const never = () => assert.fail('fn was called')
    for (const call of [
      () => a.acquireLock('late'),
      () => a.releaseLock('late'),
      () => a.acquireAndExecute('late', never),
      () => a.acquireAndExecute({ name: 'late' }, never),
      () => a.acquire('late'),
      () => a.tryAcquire('late'),
      () => a.using('late', never),
      () => a.restore(json),
      () => a.inspect('late'),
      () => a.list(),
      () => a.forceRelease('theirs'),
    ]) {
      await rejects(call(), 'LOCK_CLOSED', { retryable: false })
    }
    assert.equal(a.stats().held, 0)
    assert.deepEqual(
      (await b.list()).map((info) => info.name),
      ['theirs'],
    )
  })

  test('close while using runs makes using reject with LOCK_LOST', async (store) => {
    const [a, b] = await store.connectAll(2)
    const taken = await rejection(
      a.using('running', async (lock) => {
        await a.close()
        assert.equal(lock.isHeld, false)
        assert.equal(lock.signal.aborted, true)
        await assertFree(b, 'running')
      }),
    )
    assert.equal(taken.code, 'LOCK_LOST')
  })

  test('close while acquireAndExecute runs aborts the signal, and acquireAndExecute returns the result of fn', async (store) => {
    const a = await store.connect()
    const given = await a.acquireAndExecute('running', async (lock) => {
      const aborted = new Promise((resolve) => lock.signal.addEventListener('abort', resolve))
      await a.close()
      await aborted
      return lock.signal.reason.code
    })
    assert.equal(given, 'LOCK_LOST')
  })

  test('using never resolves when close released its lock', async (store) => {
    const b = await store.connect()
    for (let round = 0; round < 12; round++) {
      const a = await store.connect()
      const usings = ['c1', 'c2', 'c3'].map((name) => {
        let held
        return a.using(name, (lock) => (held = lock.isHeld)).then(() => held)
      })
      const settled = Promise.allSettled(usings)
      if (round % 3 === 1) await null
      if (round % 3 === 2) await sleep(round / 4)
      await a.close()
      for (const result of await settled) {
        // A call that resolved had its lock; a call whose lock close released rejects.
        if (result.status === 'fulfilled') assert.equal(result.value, true)
        else assert.ok(['LOCK_CLOSED', 'LOCK_LOST'].includes(result.reason.code), result.reason.code)
      }
      assert.deepEqual(await b.list(), [])
    }
  })

  test('a waiter of another service is served at once when close releases the name', async (store) => {
    const [a, b] = await store.connectAll(2)
    await a.acquire('next')
    const next = b.acquire('next', { waitMs: 60_000 })
    await waiting(b, 1)
    await a.close()
    const took = await timed(next)
    assert.ok(took < SOON_MS, `after ${took} ms`)
    assert.equal(await (await next).release(), true)
  })

  test('close during an acquisition leaves no lock', async (store) => {
    const b = await store.connect()
    for (let round = 0; round < 12; round++) {
      const a = await store.connect()
      const calls = [a.acquire('crossed'), a.tryAcquire('tried'), a.acquireLock('gist'), a.acquire(['c1', 'c2'])]
      const settled = Promise.allSettled(calls)
      if (round % 3 === 1) await null
      if (round % 3 === 2) await sleep(round / 4)
      await a.close()
      for (const result of await settled) {
        if (result.status === 'rejected') assert.equal(result.reason.code, 'LOCK_CLOSED')
        else if (typeof result.value === 'object' && result.value !== null) assert.equal(result.value.isHeld, false)
      }
      for (const name of ['crossed', 'tried', 'gist', 'c1', 'c2']) assert.equal(await b.inspect(name), null, name)
    }
  })

  test('close during a release leaves no lock', async (store) => {
    const b = await store.connect()
    for (let round = 0; round < 12; round++) {
      const a = await store.connect()
      const locks = await Promise.all(['r1', 'r2', ['r3', 'r4']].map((names) => a.acquire(names)))
      // The I/O thread goes idle, and the following calls wake it.
      await sleep(5)
      // The releases are called in the tick of the close, or before it.
      const closing = round % 4 < 2 && a.close()
      const released = locks.map((lock) => (round % 2 ? lock.release() : lock[Symbol.asyncDispose]()))
      if (round % 3 === 1) await null
      if (round % 3 === 2) await sleep(round / 4)
      await Promise.all([closing, a.close()])
      assert.deepEqual(await b.list(), [])
      if (!closing)
        assert.deepEqual(
          await Promise.all(released),
          locks.map(() => (round % 2 ? true : undefined)),
        )
      await Promise.all(released)
    }
  })

  test('close of one service does not affect other services of the store', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const lock = await b.acquire('kept', { ttlMs: 3500 })
    const wait = rejection(c.acquire('kept', { waitMs: 5000 }))
    await a.close()
    assert.equal((await wait).code, 'LOCK_TIMEOUT')
    assert.equal(lock.isHeld, true)
    assert.equal(await lock.release(), true)
  })

  test('a service that was dropped closes, once nothing uses it any more', async (store, t) => {
    if (process.platform !== 'linux') return skip(t, 'connections are counted in /proc')
    const args = [JSON.stringify([store.target, store.options])]
    const isMemory = store.kind === 'memory'
    assert.equal(await output(DROPS, { args, flags: ['--expose-gc'] }), isMemory ? '' : 'HOLDFAST_NOT_CLOSED')
  })
}
