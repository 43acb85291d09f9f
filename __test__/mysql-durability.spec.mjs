// What a grant survives on MariaDB: a kill of the server, and with semi-synchronous replication the loss of the primary.
import assert from 'node:assert/strict'
import { describe, it } from 'node:test'
import { locateMariadb, startMariadb } from '../scripts/mysql.mjs'
import { LockService } from '../index.js'
import { logged, promote, query, startPair } from './mysql-replication.mjs'
import { canStartServer } from './stores.mjs'
import { INDEX, later, output, sleep, waiting } from './tools.mjs'

// In /dev/shm MariaDB maps its log into memory: a kill loses nothing there, whatever the settings.
delete process.env.HOLDFAST_SERVERS_DIR

describe('mysql: durability', { concurrency: 1 }, () => {
  const test = (name, start, body) =>
    it(name, { timeout: 120_000 }, async (t) => {
      if (!(await canStartServer(t, 'mysql', locateMariadb))) return
      const server = await start()
      const services = []
      t.after(async () => {
        await Promise.all(services.map((service) => service.close()))
        await server.stop()
      })
      const connect = async (url = server.url) => {
        const service = await LockService.connect(url, { storeTimeoutMs: 8000 })
        services.push(service)
        return service
      }
      await body(server, connect)
    })

  for (const hasLog of [false, true]) {
    const start = () => startMariadb({ settings: hasLog ? logged(1) : {} })
    test(`a kill right after a grant, ${hasLog ? 'with' : 'without'} a binary log`, start, async (server, connect) => {
      const [locks, other] = [await connect(), await connect()]
      let last = 0n
      for (let round = 0; round < 4; round++) {
        const names = [['a'], ['b', 'c'], ['d']]
        const granted = await Promise.all(names.map((names) => locks.acquire(names, { ttlMs: 90_000, renew: false })))
        await server.kill()
        await server.restart()
        for (const lock of granted) {
          assert.ok(lock.fencingToken > last, 'tokens grow')
          for (const name of lock.names) {
            assert.equal((await other.inspect(name))?.fencingToken, lock.fencingToken)
            assert.equal(await other.tryAcquire(name), null)
          }
          assert.equal(await lock.release(), true)
        }
        last = granted.map((lock) => lock.fencingToken).reduce((one, other) => (one > other ? one : other))
      }
    })
  }

  test(
    'semi-synchronous replication: a grant waits for the replica',
    startPair,
    async ({ primary, replica }, connect) => {
      const locks = await connect(primary.url)
      const held = await locks.acquire('a', { ttlMs: 60_000 })
      assert.equal(await held.release(), true)
      await query(replica, 'STOP SLAVE IO_THREAD')
      let isGranted = false
      const call = locks.acquire('a', { ttlMs: 60_000 }).then((lock) => {
        isGranted = true
        return lock
      })
      await sleep(500)
      assert.equal(isGranted, false)
      // Aborted calls have their statements ended (`KILL QUERY`). The server then commits without the replica.
      for (const name of ['d', 'e']) {
        await assert.rejects(locks.acquire(name, { signal: AbortSignal.timeout(200) }))
      }
      await sleep(500)
      assert.equal(isGranted, false, 'the replica does not have it')
      await query(replica, 'START SLAVE IO_THREAD')
      const lock = await call
      assert.ok(lock.fencingToken > held.fencingToken)
      await primary.kill()
      await promote(replica)
      const after = await connect(replica.url)
      assert.equal((await after.inspect('a'))?.fencingToken, lock.fencingToken)
      assert.equal(await after.tryAcquire('a'), null)
    },
  )

  test(
    'semi-synchronous replication: a hand-off waits for the replica',
    startPair,
    async ({ primary, replica }, connect) => {
      const [locks, other] = [await connect(primary.url), await connect(primary.url)]
      // With AFTER_COMMIT, the default of MariaDB, other sessions see a commit before the replica has it.
      for (const point of ['AFTER_SYNC', 'AFTER_COMMIT']) {
        await query(primary, `SET GLOBAL rpl_semi_sync_master_wait_point = ${point}`)
        const held = await locks.acquire('n', { ttlMs: 60_000 })
        let isServed = false
        const waiter = other.acquire('n', { ttlMs: 60_000, waitMs: 60_000 }).then((lock) => {
          isServed = true
          return lock
        })
        await waiting(other, 1)
        await query(replica, 'STOP SLAVE IO_THREAD')
        const release = later(held.release())
        await sleep(1000)
        assert.equal(isServed, false, `the replica does not have it: ${point}`)
        await query(replica, 'START SLAVE IO_THREAD')
        assert.equal(await release, true)
        const next = await waiter
        assert.ok(next.fencingToken > held.fencingToken)
        assert.equal(await next.release(), true)
      }
    },
  )

  test(
    'a warning of sync_binlog: without the binary log, a restart rolls commits back',
    () => startMariadb({ settings: logged(1) }),
    async (server) => {
      const code = `
        import { LockService } from ${JSON.stringify(INDEX)}
        process.on('warning', ({ code, message }) => console.log(code, message))
        const locks = await LockService.connect(process.argv[1])
        await locks.using('n', () => {})
        await locks.close()`
      const warnings = () => output(code, { args: [server.url], flags: ['--no-warnings'] })
      assert.equal(await warnings(), '')
      await query(server, 'SET GLOBAL sync_binlog = 0')
      const text = await warnings()
      assert.match(text, /^HOLDFAST_STORE .* has sync_binlog = 0: a crash of the server or its machine may lose/)
      assert.equal(text.split('\n').length, 1)
    },
  )
})
