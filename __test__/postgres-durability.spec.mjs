// What waits for the disk and for standbys on PostgreSQL: grants and hand-offs, not releases.
import assert from 'node:assert/strict'
import { describe, it } from 'node:test'
import { startPostgres } from '../scripts/postgres.mjs'
import { LockService } from '../index.js'
import { withPostgres } from './postgres-client.mjs'
import { skip } from './stores.mjs'
import { later, sleep, until, waiting } from './tools.mjs'

/** Starts a call that waits for the name `n`. */
async function waiterOf(service) {
  const waiter = { isServed: false, granted: service.acquire('n', { ttlMs: 60_000, waitMs: 60_000 }) }
  waiter.granted.then(
    () => (waiter.isServed = true),
    () => {},
  )
  await waiting(service, 1)
  return waiter
}

describe('postgres: durability', { concurrency: 1 }, () => {
  const test = (name, body) =>
    it(name, { timeout: 60_000 }, async (t) => {
      const server = await startPostgres().catch((/** @type {Error} */ error) => error)
      if (server instanceof Error) return skip(t, `no postgres: ${server.message}`)
      const services = []
      t.after(async () => {
        await Promise.all(services.map((service) => service.close()))
        await server.stop()
      })
      const connect = async () => {
        const service = await LockService.connect(server.url, { storeTimeoutMs: 20_000 })
        services.push(service)
        return service
      }
      /** Sets the standbys for which commits wait. With the name of a standby that does not exist, they wait until the next change. */
      const standbys = (/** @type {string} */ names) =>
        withPostgres(server.url, async (client) => {
          await client.query(`ALTER SYSTEM SET synchronous_standby_names = '${names}'`)
          await client.query('SELECT pg_reload_conf()')
          await until('the setting', async () => {
            const { rows } = await client.query('SHOW synchronous_standby_names')
            return rows[0].synchronous_standby_names === names
          })
          await sleep(100)
        })
      /** Cancels a statement that waits for standbys, as an operator would. The server then commits without them. */
      const cancel = () =>
        withPostgres(server.url, async (client) => {
          const text = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
          await until('a cancelled statement', async () => (await client.query(text)).rows.length > 0)
        })
      await body({ connect, standbys, cancel })
    })

  test('a grant waits for standbys, and a release does not', async ({ connect, standbys, cancel }) => {
    const locks = await connect()
    const held = await Promise.all(['a', 'b', 'c'].map((name) => locks.acquire(name, { ttlMs: 60_000 })))
    await standbys('absent')
    // One alone, and two that share a statement.
    assert.equal(await held[0].release(), true)
    assert.deepEqual(await Promise.all([held[1].release(), held[2].release()]), [true, true])
    let isGranted = false
    const call = locks.acquire('a', { ttlMs: 60_000 }).then((lock) => {
      isGranted = true
      return lock
    })
    await sleep(500)
    assert.equal(isGranted, false)
    // Aborted calls have their statements cancelled. The server then commits without the standby.
    for (const name of ['d', 'e']) {
      await assert.rejects(locks.acquire(name, { signal: AbortSignal.timeout(200) }))
    }
    await sleep(500)
    assert.equal(isGranted, false, 'no standby has it')
    await cancel()
    await sleep(500)
    assert.equal(isGranted, false, 'no standby has it')
    await standbys('')
    const lock = await call
    assert.ok(lock.fencingToken > held[0].fencingToken)
    assert.equal(await lock.release(), true)
  })

  test('a hand-off waits for standbys', async ({ connect, standbys }) => {
    const [locks, other] = [await connect(), await connect()]
    // In the first round the engine does not know yet that the name has a queue, and releases by another statement. Names that are
    // released together share a statement.
    for (const { service, names } of [
      { service: other, names: ['n'] },
      { service: other, names: ['n'] },
      { service: other, names: ['n', 'free'] },
      { service: other, names: ['free', 'n'] },
      { service: locks, names: ['n'] },
      { service: locks, names: ['n', 'free'] },
    ]) {
      const what = `${names}, a waiter of ${service === locks ? 'the same' : 'another'} service`
      const held = await Promise.all(names.map((name) => locks.acquire(name, { ttlMs: 60_000 })))
      const waiter = await waiterOf(service)
      await standbys('absent')
      const releases = later(Promise.all(held.map((lock) => lock.release())))
      await sleep(1000)
      assert.equal(waiter.isServed, false, `no standby has it: ${what}`)
      await standbys('')
      assert.deepEqual(
        await releases,
        names.map(() => true),
      )
      const next = await waiter.granted
      assert.ok(next.fencingToken > held[names.indexOf('n')].fencingToken)
      assert.equal(await next.release(), true)
    }
  })

  test('a hand-off whose commit is cancelled while it waits for standbys is no grant', async ({
    connect,
    standbys,
    cancel,
  }) => {
    const [locks, other] = [await connect(), await connect()]
    for (const { service, names } of [
      { service: other, names: ['n'] },
      { service: other, names: ['n'] },
      { service: other, names: ['n', 'm'] },
      { service: locks, names: ['n'] },
    ]) {
      const held = await locks.acquire(names, { ttlMs: 60_000 })
      const waiter = await waiterOf(service)
      await standbys('absent')
      const release = later(held.release())
      for (let count = 0; count < 2; count++) {
        await cancel()
        await sleep(400)
        assert.equal(waiter.isServed, false, `no standby has it: ${names}`)
      }
      await standbys('')
      await release.catch(() => {})
      const next = await waiter.granted
      assert.ok(next.fencingToken > held.fencingToken)
      assert.equal(await next.release(), true)
    }
  })
})
