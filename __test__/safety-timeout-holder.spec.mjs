// LOCK_TIMEOUT names the busy name, its holder, and the rest of the holder's lease.
import assert from 'node:assert/strict'
import { hostname } from 'node:os'
import { isLockError } from '../index.js'
import { start } from './children/start.mjs'
import { rejects, until, waiting } from './tools.mjs'
import { suite } from './stores.mjs'

/** Repeats a call until its error has a holder: a store of a busy machine may not answer within 250 ms. */
const timeoutWithHolder = (call, key) =>
  until('an error with a holder', async () => {
    const error = await rejects(call(), 'LOCK_TIMEOUT', { key, retryable: true })
    return error.holder === null ? (assert.equal(error.remainingMs, null), undefined) : error
  })

for (const kind of [
  'memory',
  'sqlite',
  'redis',
  'redis-cluster',
  'redis-quorum',
  'mongodb',
  'mongodb-replica-set',
  'postgres',
  'mysql',
  'etcd',
  'zookeeper',
]) {
  suite(kind, 'LOCK_TIMEOUT', (test) => {
    test('it has the busy name of several, the holder, and the rest of its lease', async (store) => {
      const [a, b] = await store.connectAll(2)
      const lock = await a.acquire('{n}2', { ttlMs: 60_000 })
      const { since } = (await b.inspect('{n}2')).holder
      const names = ['{n}1', '{n}2', '{n}3']
      for (const call of [
        (waitMs) => b.acquire(names, { waitMs }),
        (waitMs) => b.using(names, { waitMs }, () => assert.fail('fn was called')),
      ]) {
        for (const waitMs of [0, 100]) {
          const error = await timeoutWithHolder(() => call(waitMs), '{n}2')
          assert.deepEqual(error.holder, { host: hostname(), pid: process.pid, since })
          const { remainingMs } = error
          const longest = store.lasting(60_000)
          assert.ok(remainingMs && remainingMs > longest / 2 && remainingMs <= longest, `${remainingMs} ms`)
          const holder = `it is held by this process (pid ${process.pid} on ${hostname()})`
          assert.equal(error.message, `the lock "{n}2" was still busy after ${waitMs} ms: ${holder}`)
          assert.ok(isLockError(error, 'LOCK_TIMEOUT') && JSON.parse(JSON.stringify(error)).holder.pid === process.pid)
        }
      }
      assert.equal(await lock.release(), true)
    })

    test('waiters behind other waiters have it, too', async (store) => {
      const [a, b] = await store.connectAll(2)
      const lock = await a.acquire('n')
      const calls = Array.from({ length: 30 }, () => timeoutWithHolder(() => b.acquire('n', { waitMs: 200 }), 'n'))
      for (const error of await Promise.all(calls)) assert.equal(error.holder?.pid, process.pid, error.message)
      assert.equal(await lock.release(), true)
    })

    // These stores do not keep the reservation, so the other caller acquires the name.
    if (!['mongodb', 'mongodb-replica-set', 'redis-quorum'].includes(kind)) {
      test('a name that is reserved for a waiter of several names has no holder', async (store) => {
        const [a, b] = await store.connectAll(2)
        const lock = await a.acquire('{n}2')
        const controller = new AbortController()
        const set = assert.rejects(b.acquire(['{n}1', '{n}2'], { waitMs: 60_000, signal: controller.signal }))
        await waiting(b, 1)
        const { message } = await until('the error of a reserved name', async () => {
          const error = await a.acquire('{n}1', { waitMs: 0 }).catch((thrown) => thrown)
          if (error instanceof Error) return error.message.includes('not known') ? undefined : error
          await error.release()
        })
        assert.match(message, /after 0 ms: it has no holder now: it is reserved for a waiting call/)
        controller.abort()
        await set
        assert.equal(await lock.release(), true)
      })
    }

    if (kind === 'memory') return
    test('a holder in another process is named', async (store, t) => {
      const a = await store.connect()
      const child = start(t, 'hold', { url: store.target, options: store.options, names: 'n' })
      await child.next('held')
      const error = await timeoutWithHolder(() => a.acquire('n', { waitMs: 0 }), 'n')
      assert.deepEqual([error.holder?.host, error.holder?.pid], [hostname(), child.pid])
      assert.ok(error.message.endsWith(`: it is held by pid ${child.pid} on ${hostname()}`), error.message)
      child.send('release')
      await child.next('released')
      await child.endInput()
    })
  })
}
