// Node's event loop polls the tasks of the engines of SQL servers, and PostgreSQL's sockets. The tests make calls while the loop is blocked
// and at the end of an environment.
import assert from 'node:assert/strict'
import { once } from 'node:events'
import { Worker } from 'node:worker_threads'
import { eventLoopCases } from './event-loop-cases.mjs'
import { withMysql } from './mysql-client.mjs'
import { withPostgres } from './postgres-client.mjs'
import { startProxy } from './proxy.mjs'
import { suite } from './stores.mjs'
import { INDEX, later, output, sleep, SOON_MS, timed, until, waiting } from './tools.mjs'

const WORKER = `
  const { parentPort, workerData: { index, target, options } } = require('node:worker_threads')
  import(index).then(async ({ LockService }) => {
    const locks = await LockService.connect(target, options)
    await locks.acquire('held', { ttlMs: 2000 })
    locks.acquire('held', { waitMs: Infinity })
    for (let i = 0; i < 10; i++) locks.acquireLock('n' + i, 2)
    parentPort.postMessage('waits')
  })`

/** Holds two names while its event loop is blocked for 10 s. */
const STALLED = `
  const { parentPort, workerData: { index, target, options } } = require('node:worker_threads')
  import(index).then(async ({ LockService }) => {
    const locks = await LockService.connect(target, options)
    const lock = await locks.acquire(['s0', 's1'], { ttlMs: 4500 })
    parentPort.postMessage('held')
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 10_000)
    const { isHeld } = lock
    const isReleased = await lock.release()
    await locks.close()
    parentPort.postMessage({ isHeld, isReleased })
  })`

/** Locks the rows of names for 150 ms, as another program does. Resolves to how long it waited for them, in milliseconds. */
const LOCK_ROWS = {
  postgres: (url, names) =>
    withPostgres(url, async (client) => {
      await client.query('BEGIN')
      const text = 'SELECT 1 FROM holdfast.locks WHERE name = ANY($1) ORDER BY name FOR UPDATE'
      const waitedMs = await timed(client.query(text, [names]))
      await sleep(150)
      await client.query('COMMIT')
      return waitedMs
    }),
  mysql: (url, names) =>
    withMysql(url, async (client) => {
      await client.query('BEGIN')
      const text = 'SELECT 1 FROM locks WHERE name IN (?) ORDER BY name FOR UPDATE'
      const waitedMs = await timed(client.query(text, [names]))
      await sleep(150)
      await client.query('COMMIT')
      return waitedMs
    }),
}

/** Count the connections of all services: on PostgreSQL by the table in their last statement, on MySQL by their database. */
const COUNTS = {
  postgres: (url, table) =>
    withPostgres(url, async (client) => {
      const like = [`%"${table}%`]
      const text = 'SELECT count(*)::int AS count FROM pg_stat_activity WHERE query LIKE $1 AND pid <> pg_backend_pid()'
      return (await client.query(text, like)).rows[0].count
    }),
  mysql: (url, database) =>
    withMysql(url, async (client) => {
      const text = 'SELECT COUNT(*) AS count FROM information_schema.processlist WHERE db = ? AND id <> CONNECTION_ID()'
      return Number((await client.query(text, [database]))[0][0].count)
    }),
}

for (const kind of /** @type {const} */ (['postgres', 'mysql'])) {
  // One at a time: a blocked event loop would block the other tests.
  suite(kind, 'the event loop', { concurrency: 1 }, (test) => {
    eventLoopCases(test)

    test('a lease of several names is renewed while the event loop is blocked and another program locks its rows', async (store) => {
      const workerData = { index: INDEX, target: store.target, options: store.options }
      const worker = new Worker(STALLED, { eval: true, workerData })
      await once(worker, 'message')
      const ended = once(worker, 'message')
      let hasEnded = false
      later(ended.then(() => (hasEnded = true)))
      const names = ['s0', 's1'].map((name) => Buffer.from(store.options.keyPrefix + name))
      while (!hasEnded) {
        const waitedMs = await LOCK_ROWS[kind](String(store.target), names)
        assert.ok(waitedMs < SOON_MS, `the service held the rows for ${waitedMs} ms`)
        await sleep(30)
      }
      assert.deepEqual((await ended)[0], { isHeld: true, isReleased: true })
      await worker.terminate()
    })

    test('calls from the callbacks of settled calls settle while nothing else wakes the event loop', async (store) => {
      const locks = await store.connect()
      const waiter = await store.connect()
      for (let round = 0; round < 20; round++) {
        const lock = await locks.acquire('chain')
        const next = waiter.acquire('chain').then((granted) => granted.release())
        await waiting(waiter, 1)
        const began = performance.now()
        await Promise.all([lock.release(), next])
        assert.ok(performance.now() - began < SOON_MS)
      }
    })

    test('a connection that is reset after a part of a reply delays its calls only briefly', async (store) => {
      const url = new URL(String(store.target))
      const proxy = await startProxy(Number(url.port))
      url.port = String(proxy.port)
      store.target = url.href
      const locks = await store.connect({ storeTimeoutMs: 30_000 })
      try {
        await locks.using('warm', () => {})
        for (let round = 0; round < 5; round++) {
          proxy.intercept = (_, connection) => {
            connection.client.write('N', () => connection.cut())
            proxy.intercept = undefined
            return true
          }
          assert.ok((await timed(locks.using('reset', () => {}))) < SOON_MS)
          assert.equal(proxy.intercept, undefined, 'a connection was reset')
        }
      } finally {
        await locks.close()
        await proxy.close()
        store.target = String(process.env[String(store.server)])
      }
    })

    test('closed services and terminated workers leave no connection', async (store) => {
      // A table, or a database, of its own, by which its connections are found.
      const table = `locks_${process.pid}_${Date.now()}`
      const url = new URL(String(store.target))
      const client = kind === 'postgres' ? withPostgres : withMysql
      const options = kind === 'postgres' ? { ...store.options, table } : store.options
      if (kind === 'mysql') {
        await client(url.href, (one) => one.query(`CREATE DATABASE ${table}`))
        url.pathname = `/${table}`
      }
      const count = () => COUNTS[kind](url.href, table)
      store.target = url.href
      try {
        for (let i = 0; i < 5; i++) {
          const brief = await store.connect({ table: options.table })
          await brief.using('warm', () => {})
          assert.ok((await count()) >= 1)
          await brief.close()
        }
        await until('the connections are closed', async () => (await count()) === 0)
        for (let i = 0; i < 3; i++) {
          const worker = new Worker(WORKER, { eval: true, workerData: { index: INDEX, target: url.href, options } })
          await once(worker, 'message')
          // Its last statement may be a COMMIT, without the table.
          await until('a connection is open', async () => (await count()) >= 1)
          await worker.terminate()
        }
        await until('the connections are closed', async () => (await count()) === 0)
      } finally {
        store.target = String(process.env[String(store.server)])
        const drop = kind === 'mysql' ? `DROP DATABASE ${table}` : `DROP TABLE ${table}, ${table}_waiters`
        await client(String(store.target), (one) => one.query(drop))
      }
    })

    test('a process with nothing but held leases and open connections exits', async (store) => {
      const stdout = await output(`
        import { LockService } from ${JSON.stringify(INDEX)}
        const locks = await LockService.connect(${JSON.stringify(store.target)}, ${JSON.stringify(store.options)})
        const lock = await locks.acquire('left')
        console.log(lock.isHeld, await lock.release())
        await locks.acquire('left', { ttlMs: 100, renew: false })
      `)
      assert.equal(stdout.trim(), 'true true')
      await until('the lease ends', async () => (await store.connect()).acquireLock('left').then((free) => free))
      store.mayLeaveLocks = true
    })
  })
}
