// What a grant survives: a kill of the server, and with synchronous replication the loss of the primary.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { LockService } from '../../index.js'
import { canStartServer } from '../stores.mjs'
import { later, sleep, until, waiting, warningsOf } from '../tools.mjs'

const STORE_TIMEOUT_MS = 20_000
/** How long a call stays unanswered before the test decides that it waits for the replica. */
const UNANSWERED_MS = 600

/** Starts a call that waits for the name `n`. */
async function waiterOf(service) {
  const waiter = {
    isServed: false,
    granted: later(service.acquire('n', { ttlMs: 60_000, waitMs: 60_000, onStoreError: 'wait' })),
  }
  waiter.granted.then(
    () => (waiter.isServed = true),
    () => {},
  )
  await waiting(service, 1)
  return waiter
}

/** Declares the suite. `driver` starts servers, and pairs of them; see `startPair` in `postgres-replication.mjs`. */
export function durability(driver) {
  // In /dev/shm MariaDB maps its log into memory: a kill loses nothing there, whatever the settings.
  delete process.env.HOLDFAST_SERVERS_DIR

  /** Declares a group of tests with the servers that `start` starts. `urlOf` returns their URL. */
  const group = (title, start, urlOf, define) =>
    describe(`${driver.kind}: durability, ${title}`, { concurrency: 1 }, () => {
      const skipped = []
      /** @type {any} */
      let servers
      before(async () => {
        const can = { skip: (reason) => skipped.push(reason) }
        if (await canStartServer(can, driver.kind, driver.locate)) servers = await start()
      })
      after(() => servers?.stop())
      define((name, body) =>
        it(name, { timeout: 120_000 }, async (t) => {
          if (!servers) return t.skip(skipped[0])
          const services = []
          const connect = async (url = urlOf(servers), options = servers.options) => {
            services.push(await LockService.connect(url, { storeTimeoutMs: STORE_TIMEOUT_MS, ...options }))
            return services.at(-1)
          }
          try {
            await body(servers, connect)
          } catch (error) {
            // It fails, too, where the test has not detached the replica.
            await Promise.resolve(servers.attach?.()).catch(() => {})
            throw error
          } finally {
            await Promise.all(services.map((service) => service.close()))
          }
        }))
    })

  for (const { title, settings = {}, unsafe } of driver.logs) {
    group(
      title,
      () => driver.start({ settings }),
      ({ url }) => url,
      (test) => {
        test(`a warning of ${unsafe.text}`, async (server) => {
          assert.equal(await warningsOf(server.url), '')
          await driver.query(server, unsafe.set)
          try {
            assert.match(await warningsOf(server.url), new RegExp(`^HOLDFAST_STORE .* has ${unsafe.text}.*$`))
          } finally {
            await driver.query(server, unsafe.reset)
          }
        })

        test('a kill right after a grant', async (server, connect) => {
          const [locks, other] = [await connect(), await connect()]
          let last = 0n
          for (let round = 0; round < 4; round++) {
            const names = [['a'], ['b', 'c'], ['d']]
            const granted = await Promise.all(
              names.map((names) => locks.acquire(names, { ttlMs: 90_000, renew: false })),
            )
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
      },
    )
  }

  group(
    'a synchronous replica',
    () => driver.startPair(),
    (pair) => pair.url(),
    (test) => {
      test('a grant waits for the replica', async (pair, connect) => {
        const locks = await connect()
        const held = await Promise.all(['a', 'b', 'c'].map((name) => locks.acquire(name, { ttlMs: 60_000 })))
        const release = async () => {
          // One alone, and two that share a statement.
          assert.equal(await held[0].release(), true)
          assert.deepEqual(await Promise.all([held[1].release(), held[2].release()]), [true, true])
        }
        if (pair.releasesWait) await release()
        await pair.detach()
        if (!pair.releasesWait) await release()
        let isGranted = false
        const call = later(locks.acquire('a', { ttlMs: 60_000, waitMs: 60_000, onStoreError: 'wait' }))
        call.then(() => (isGranted = true)).catch(() => {})
        await sleep(UNANSWERED_MS)
        assert.equal(isGranted, false)
        // Aborted calls have their statements cancelled. The server then commits without the replica.
        for (const name of ['d', 'e']) {
          await assert.rejects(locks.acquire(name, { signal: AbortSignal.timeout(200) }))
        }
        await sleep(UNANSWERED_MS)
        assert.equal(isGranted, false, 'the replica does not have it')
        if (driver.cancels) {
          await pair.cancel()
          await sleep(UNANSWERED_MS)
          assert.equal(isGranted, false, 'the replica does not have it')
        }
        await pair.attach()
        const lock = await call
        for (const { fencingToken } of held) assert.ok(lock.fencingToken > fencingToken)
        assert.equal(await lock.release(), true)
      })

      test('a hand-off waits for the replica', async (pair, connect) => {
        const [locks, other] = [await connect(), await connect()]
        // In the first round the engine does not know yet that the name has a queue, and releases by another statement. Names that
        // are released together share a statement.
        const rounds = [
          { service: other, names: ['n'] },
          { service: other, names: ['n'] },
          { service: other, names: ['n', 'free'] },
          { service: other, names: ['free', 'n'] },
          { service: locks, names: ['n'] },
          { service: locks, names: ['n', 'free'] },
        ]
        for (const round of driver.handOffs ?? rounds.keys()) {
          const { service, names } = rounds[round]
          const what = `round ${round}: ${names}, a waiter of ${service === locks ? 'the same' : 'another'} service`
          await pair.waitPoints?.[round % 2]()
          const held = await Promise.all(names.map((name) => locks.acquire(name, { ttlMs: 60_000 })))
          const waiter = await waiterOf(service)
          await pair.detach()
          const releases = later(Promise.all(held.map((lock) => lock.release())))
          await sleep(UNANSWERED_MS)
          assert.equal(waiter.isServed, false, `the replica does not have it: ${what}`)
          await pair.attach()
          assert.deepEqual(
            await releases,
            names.map(() => true),
          )
          const next = await waiter.granted
          assert.ok(next.fencingToken > held[names.indexOf('n')].fencingToken)
          assert.equal(await next.release(), true)
        }
      })

      if (driver.cancels)
        test('a hand-off whose commit is cancelled while it waits for the replica is no grant', async (pair, connect) => {
          const [locks, other] = [await connect(), await connect()]
          for (const { service, names } of [
            { service: other, names: ['n'] },
            { service: other, names: ['n'] },
            { service: other, names: ['n', 'm'] },
            { service: locks, names: ['n'] },
          ]) {
            const held = await locks.acquire(names, { ttlMs: 60_000 })
            const waiter = await waiterOf(service)
            await pair.detach()
            const release = later(held.release())
            for (let count = 0; count < 2; count++) {
              await pair.cancel()
              await sleep(UNANSWERED_MS)
              assert.equal(waiter.isServed, false, `the replica does not have it: ${names}`)
            }
            await pair.attach()
            await release.catch(() => {})
            const next = await waiter.granted
            assert.ok(next.fencingToken > held.fencingToken)
            assert.equal(await next.release(), true)
          }
        })

      test('a grant is at the replica when the primary is lost', async (pair, connect) => {
        const service = await connect()
        await pair.detach()
        const call = later(service.acquire(['a', 'b'], { ttlMs: 60_000, waitMs: 60_000, onStoreError: 'wait' }))
        await assert.rejects(service.acquire('d', { signal: AbortSignal.timeout(200) }))
        await pair.attach()
        const lock = await call
        await pair.lose()
        await pair.promote()
        const locks = await connect(pair.replica.url, {})
        for (const name of lock.names) {
          assert.equal((await locks.inspect(name))?.fencingToken, lock.fencingToken)
          assert.equal(await locks.tryAcquire(name), null)
        }
        await until('the old service finds the new primary', () => lock.release().catch(() => false))
      })
    },
  )
}
