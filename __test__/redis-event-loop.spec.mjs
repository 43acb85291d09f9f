// The connection that the event loop polls, with and without TLS: calls while the event loop is blocked, and while its connection is broken or silent.
import assert from 'node:assert/strict'
import { once } from 'node:events'
import { after, before, describe, test } from 'node:test'
import { Worker } from 'node:worker_threads'
import { LockService } from '../index.js'
import { eventLoopCases } from './event-loop-cases.mjs'
import { startProxy } from './proxy.mjs'
import { connectionsTo, openRedis, startRedisWithTls } from './redis-client.mjs'
import { INDEX, output, sleep, until } from './tools.mjs'

const WORKER = `
  const { parentPort, workerData: { index, url, options, name } } = require('node:worker_threads')
  import(index).then(async ({ LockService }) => {
    const locks = await LockService.connect(url, options)
    await locks.acquire(name)
    locks.acquire(name, { waitMs: Infinity })
    for (let i = 0; i < 10; i++) locks.acquireLock(name + i)
    parentPort.postMessage('waits')
  })`

for (const secure of [false, true]) {
  describe(secure ? 'through TLS' : 'without TLS', () => {
    let redis
    let other
    let locks

    /** Connects a service, by default to database 0. */
    const connect = (path = '', options = {}) =>
      LockService.connect(target().url + path, { keyPrefix: 'loop:', ...target().options, ...options })
    /** The URL of the server, and the options to connect to it. */
    const target = () => (secure ? redis.secure : { url: redis.url, options: {} })
    /** The code that connects a service in another process. */
    const connecting = () => `LockService.connect(${JSON.stringify(target().url)}, ${JSON.stringify(target().options)})`

    before(async () => {
      redis = await startRedisWithTls()
      other = openRedis(redis.url)
      locks = await connect()
    })

    after(async () => {
      other?.disconnect()
      await locks?.close()
      await redis?.stop()
    })

    const connections = () => connectionsTo(redis.port)

    eventLoopCases((name, body) =>
      test(name, async () => {
        const options = { keyPrefix: 'loop:', ...target().options }
        const services = /** @type {Promise<LockService>[]} */ ([])
        const open = (more = {}) => {
          services.push(connect('', more))
          return services[services.length - 1]
        }
        await body({ connect: open, target: target().url, options, hasUniqueTokens: true })
        await Promise.all(services.map(async (service) => (await service).close()))
      }),
    )

    test('calls and messages to waiters use one connection', async () => {
      assert.equal(await locks.acquireLock('which'), true)
      assert.equal((await connections()).length, 1)
      const waiter = connect().then(async (own) => {
        const lock = await own.acquire('which')
        await lock.release()
        await own.close()
      })
      await until('the waiter is subscribed', async () => {
        const channels = await other.pubsub('CHANNELS', 'holdfast:to:*')
        const counts = (await other.pubsub('NUMSUB', ...channels)).filter((_, i) => i % 2)
        return counts.some((count) => Number(count) === 1)
      })
      assert.equal((await connections()).length, 2, 'one of each service')
      assert.equal(await locks.releaseLock('which'), true)
      await waiter
    })

    test('a broken connection fails no call and is opened again', async () => {
      for (let round = 0; round < 3; round++) {
        await until('a connection', async () => {
          await locks.tryAcquire('any').then((lock) => lock.release())
          return (await connections()).length === 1
        })
        const [id] = await connections()
        const calls = Array.from({ length: 20 }, (_, i) => locks.tryAcquire(`broken${round}-${i}`))
        await other.client('KILL', 'ID', id)
        for (const lock of await Promise.all(calls)) await lock.release()
      }
      await until('nothing is left', async () => (await locks.list()).length === 0)
    })

    test('a connection that is silent for storeTimeoutMs is replaced', async () => {
      const storeTimeoutMs = 4000
      const proxy = await startProxy(redis.port, { secure })
      const url = `${secure ? 'rediss' : 'redis'}://127.0.0.1:${proxy.port}`
      const own = await LockService.connect(url, {
        keyPrefix: 'loop:',
        storeTimeoutMs,
        tls: secure ? { insecure: true } : undefined,
      })
      try {
        // The reply to an acquisition is lost, and all later replies on its connection.
        const lost = proxy.dropReply('$6\r\nEXISTS')
        const calls = []
        await until('a call used plain commands', async () => {
          calls.push(own.acquireLock(`silent${calls.length}`).catch(() => false))
          return Promise.race([calls.at(-1).then(() => false), lost])
        })
        await sleep(storeTimeoutMs)
        // Later calls use another connection, and do not wait for replies on the silent one.
        const lock = await Promise.race([own.tryAcquire('answered'), sleep(storeTimeoutMs / 2)])
        assert.ok(lock?.isHeld)
        await lock.release()
        await Promise.all(calls.map(async (call, i) => (await call) && own.releaseLock(`silent${i}`)))
      } finally {
        await own.close()
        await proxy.close()
      }
      await until('nothing is left', async () => (await locks.list()).length === 0)
    })

    test('a record that was not stored when the connection broke is stored without a further call', async () => {
      const proxy = await startProxy(redis.port, { secure })
      const own = await LockService.connect(`${secure ? 'rediss' : 'redis'}://127.0.0.1:${proxy.port}`, {
        keyPrefix: 'loop:',
        tls: secure ? { insecure: true } : undefined,
      })
      try {
        // Only the record of a grant by plain commands names this key without the lock's attempt.
        const isRecord = (data) => data.includes('holdfast:fence:{loop:recorded}') && !data.includes('EXISTS')
        const cut = new Promise((resolve) => {
          proxy.intercept = (data, connection) => {
            if (!isRecord(data)) return false
            proxy.intercept = undefined
            connection.cut()
            resolve(true)
            return true
          }
        })
        let lock
        await until('a record is sent', async () => {
          await lock?.release()
          lock = await own.acquire('recorded')
          return Promise.race([cut, sleep(50)])
        })
        await until('the record', async () => (await locks.inspect('recorded'))?.fencingToken === lock.fencingToken)
        assert.equal(await lock.release(), true)
      } finally {
        await own.close()
        await proxy.close()
      }
    })

    /** Counts the connections that use a database. No other service of these tests uses it. */
    const connectionsOf = async (db) =>
      (await other.client('LIST')).split('\n').filter((line) => line.includes(` db=${db} `)).length

    test('services that are opened and closed leave no connection', async () => {
      for (let i = 0; i < 20; i++) {
        const brief = await connect('/5')
        assert.equal(await brief.releaseLock('never held'), false)
        assert.ok((await connectionsOf(5)) >= 1)
        await brief.close()
      }
      await until('the connections are closed', async () => (await connectionsOf(5)) === 0)
    })

    test('calls without a request settle one after the other while nothing else is in progress', async () => {
      const stdout = await output(`
    import { LockService } from ${JSON.stringify(INDEX)}
    const locks = await ${connecting()}
    const lock = await locks.acquire('bare')
    await lock.release()
    for (let i = 0; i < 100; i++) {
      await locks.releaseLock('never held')
      await lock.release()
    }
    const memory = await LockService.connect('memory:bare')
    for (let i = 0; i < 100; i++) await memory.acquireLock('n' + i)
    await memory.close()
    await locks.close()
    for (let i = 0; i < 100; i++) await locks.acquireLock('late').catch((error) => error.code)
    console.log('done')
  `)
      assert.equal(stdout, 'done')
    })

    test('an idle process that has waited once does not wake up', { skip: process.platform !== 'linux' }, async () => {
      // After a store timeout.
      const wakeups = await output(`
    import { readdirSync, readFileSync } from 'node:fs'
    import { setTimeout as sleep } from 'node:timers/promises'
    import { LockService } from ${JSON.stringify(INDEX)}
    const locks = await ${connecting()}
    const lock = await locks.acquire('idle')
    const waiting = locks.acquire('idle')
    while ((await locks.inspect('idle')).waiting < 1) await sleep(5)
    await lock.release()
    await (await waiting).release()
    const count = () => readdirSync('/proc/self/task').reduce((sum, task) => {
      const status = readFileSync('/proc/self/task/' + task + '/status', 'utf8')
      return sum + Number(/^voluntary_ctxt_switches:\\s+(\\d+)/m.exec(status)[1])
    }, 0)
    await sleep(6500)
    const before = count()
    await sleep(2000)
    console.log(count() - before)
    process.exit(0)
  `)
      // One is the end of the pause; others are the runtime's own.
      assert.ok(Number(wakeups) < 6, wakeups)
    })

    test('a worker that is terminated with calls in flight leaves no connection', async () => {
      for (let i = 0; i < 5; i++) {
        const { url, options } = target()
        const workerData = { index: INDEX, url: `${url}/6`, options, name: `of a worker ${i}` }
        const worker = new Worker(WORKER, { eval: true, workerData })
        await once(worker, 'message')
        assert.ok((await connectionsOf(6)) >= 1)
        await worker.terminate()
      }
      await until('the connections are closed', async () => (await connectionsOf(6)) === 0)
    })
  })
}
