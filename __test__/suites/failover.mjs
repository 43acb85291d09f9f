// Three members: their leader ends, stops or is cut off. A lock has one holder, tokens grow, and service resumes.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { LockService } from '../../index.js'
import { start } from '../children/start.mjs'
import { random, skip } from '../stores.mjs'
import { later, sleep, timed, until } from '../tools.mjs'
import { noSteps, setWallClock } from '../wall-clock.mjs'

/** An election, the reconnect, and a machine that is suspended. */
const RESUMED_MS = 15_000

/** Declares the suite. `driver` starts the cluster; see `drivers/etcd.mjs`. */
export function failover(driver) {
  describe(`${driver.kind}: failover`, { timeout: 300_000 }, () => {
    /** @type {any} */
    let cluster
    let reason = ''
    before(async () => {
      await driver.locate().catch((error) => (reason = error.message))
      if (!reason) cluster = await driver.startCluster()
    })
    after(() => cluster?.stop())

    /** Declares a test with a function that connects services, which are closed at its end. */
    const test = (title, body) =>
      it(title, { timeout: 120_000 }, async (t) => {
        if (reason) return skip(t, reason)
        const keyPrefix = `test/${random()}/`
        const services = []
        const connect = async (url = cluster.url()) => {
          services.push(await LockService.connect(url, { keyPrefix, storeTimeoutMs: 3000, ...driver.service }))
          return services.at(-1)
        }
        try {
          await body(connect, await cluster.leader(), keyPrefix, t)
        } finally {
          cluster.heal()
          for (const member of cluster.members) member.resume()
          await Promise.all(services.map((service) => service.close()))
        }
      })

    /** Ends a leader in some way, while one service holds a lock and another one waits for it. */
    const takeover = (title, end, repair) =>
      test(title, async (connect, leader) => {
        const [a, b] = [await connect(), await connect()]
        const held = await a.acquire('held', { ttlMs: 30_000 })
        const wait = b.acquire('held', { waitMs: 60_000, onStoreError: 'wait' })
        // If a check fails before, its error is that of the test.
        wait.catch(() => {})
        await until('a waiter', async () => (await a.inspect('held'))?.waiting === 1)
        await end(leader)
        const others = [0, 1, 2].filter((index) => index !== leader)
        // A new name.
        let fresh
        const resumed = await timed(
          (async () => {
            while (!fresh) fresh = await b.tryAcquire('fresh', { ttlMs: 20_000 }).catch(() => null)
          })(),
        )
        assert.ok(resumed < RESUMED_MS, `after ${resumed} ms`)
        // A lease that is shorter than the ttl may end during a slow election.
        assert.ok(held.isHeld || resumed > (driver.lastsMs ?? Infinity), 'the lock survives')
        // Such a lease may also end before the answer to this call.
        const extend = () =>
          held.extend(30_000).then(
            () => true,
            (error) => assert.ok(driver.lastsMs && error.code === 'LOCK_LOST', error),
          )
        if (held.isHeld && (await extend())) assert.equal(await held.release(), true)
        const next = await wait
        assert.ok(next.fencingToken > held.fencingToken)
        await repair(leader, others)
        assert.equal(await next.release(), true)
        assert.equal(await fresh.release(), true)
        await until('the member is back', async () => (await cluster.leader()) !== undefined)
      })

    takeover(
      'the leader is killed',
      (leader) => cluster.members[leader].kill(),
      (leader) => cluster.members[leader].restart(),
    )
    takeover(
      'the leader stands still',
      (leader) => cluster.members[leader].pause(),
      (leader) => cluster.members[leader].resume(),
    )
    takeover(
      'the leader is cut off from the others',
      (leader) => cluster.cutOff(leader),
      () => cluster.heal(),
    )

    test('a holder whose only member is cut off loses the lock before the next one gets it', async (connect, leader) => {
      // Once as a follower, once as the leader.
      for (const cut of [(leader + 1) % 3, await cluster.leader()]) {
        const others = [0, 1, 2].filter((index) => index !== cut)
        const [a, b] = [await connect(cluster.url(cut)), await connect(cluster.url(...others))]
        const held = await a.acquire('n', { ttlMs: 4500 })
        let lostAt = Infinity
        held.signal.addEventListener('abort', () => (lostAt = performance.now()))
        const wait = b.acquire('n', { waitMs: 60_000, onStoreError: 'wait' })
        wait.catch(() => {})
        await until('a waiter', async () => (await b.inspect('n').catch(() => null))?.waiting === 1)
        await cluster.cutOff(cut)
        const next = await wait.catch((error) => {
          throw new Error(`the member is ${held.isHeld ? 'not ' : ''}cut off`, { cause: error })
        })
        const grantedAt = performance.now()
        assert.ok(!held.isHeld && lostAt <= grantedAt, `lost ${lostAt}, granted ${grantedAt}`)
        assert.ok(next.fencingToken > held.fencingToken)
        // The member that is cut off grants nothing, and says so.
        await assert.rejects(a.tryAcquire('other'), { code: 'LOCK_STORE' })
        cluster.heal()
        assert.equal(await next.release(), true)
        let again
        while (!again) again = await a.tryAcquire('n').catch(() => null)
        assert.ok(again.fencingToken > next.fencingToken)
        assert.equal(await again.release(), true)
      }
    })

    test('a service with all members leaves the one that is cut off within seconds', async (connect) => {
      const services = await Promise.all([0, 1, 2, 3, 4, 5].map(() => connect()))
      const cut = ((await cluster.leader()) + 1) % 3
      await cluster.cutOff(cut)
      const took = await Promise.all(
        services.map((service, index) =>
          timed(
            (async () => {
              const lock = await service.acquire(`n${index}`, { waitMs: 10_000 })
              await lock.release()
            })(),
          ),
        ),
      )
      assert.ok(Math.max(...took) < RESUMED_MS, `${took}`)
    })

    test('no two holders and no old token while members are killed, stopped and cut off', async (connect) => {
      const services = await Promise.all([0, 1, 2, 3].map(() => connect()))
      const names = ['a', 'b', 'c']
      /** @type {Record<string, { lock: any, token: bigint }>} */
      const last = Object.fromEntries(names.map((name) => [name, { lock: undefined, token: 0n }]))
      let [isStopped, grants] = [false, 0]
      const contend = async (service, name) => {
        while (!isStopped) {
          const lock = await service.acquire(name, { ttlMs: 2000, waitMs: 5000 }).catch((error) => {
            assert.ok(['LOCK_STORE', 'LOCK_TIMEOUT'].includes(error.code), error)
          })
          if (!lock?.isHeld) continue
          const before = last[name]
          assert.ok(!before.lock?.isHeld, `${name} has two holders`)
          assert.ok(lock.fencingToken > before.token, `${name}: ${lock.fencingToken} after ${before.token}`)
          last[name] = { lock, token: lock.fencingToken }
          grants++
          await sleep(Math.random() < 0.1 ? 3000 * Math.random() : 20 * Math.random())
          await lock.release().catch((error) => assert.equal(error.code, 'LOCK_STORE'))
        }
      }
      const contending = Promise.all(
        services.flatMap((service) => names.flatMap((name) => [contend(service, name), contend(service, name)])),
      )
      const faults = [
        [(index) => cluster.members[index].kill(), (index) => cluster.members[index].restart()],
        [(index) => cluster.members[index].pause(), (index) => cluster.members[index].resume()],
        [(index) => cluster.cutOff(index), () => cluster.heal()],
      ]
      const breaking = (async () => {
        for (const [round, [begin, end]] of [...faults, ...faults].entries()) {
          const leader = await cluster.leader()
          const index = round < 3 ? leader : (leader + 1) % 3
          await begin(index)
          await sleep(3000)
          await end(index)
          const count = grants
          await until('grants', () => grants > count + 20, 30_000)
        }
      })().finally(() => (isStopped = true))
      await Promise.all([contending, breaking])
    })

    test('the clocks of members step by an hour: no lease ends early or late', async (connect, leader, keyPrefix, t) => {
      if (noSteps) return t.skip(noSteps)
      const [a, b] = [await connect(), await connect()]
      const held = await a.acquire('held', { ttlMs: 9000 })
      const wait = later(b.acquire('held', { waitMs: 100_000, onStoreError: 'wait' }))
      const task = { url: cluster.url(), options: { keyPrefix }, names: 'dead', acquire: { ttlMs: 3000 } }
      if (driver.service) task.options.sessionTimeoutMs = 8000
      const members = [0, 1, 2].map((index) => cluster.members[(leader + index) % 3])
      for (const [count, seconds] of [
        [1, 3600],
        [3, -3600],
        [3, 0],
      ]) {
        const startedAt = performance.now()
        const child = start(t, 'hold', task)
        const token = BigInt(await child.next('held'))
        child.kill('SIGKILL')
        for (const member of members.slice(0, count)) await setWallClock(member, seconds)
        const ahead = (await driver.clock(members[0])) - Date.now()
        assert.ok(Math.abs(ahead - seconds * 1000) < 60_000, `the clock is ${ahead} ms ahead`)
        const next = await b.acquire('dead', { waitMs: 60_000 })
        const took = performance.now() - startedAt
        assert.ok(took > 3000 && took < 25_000, `the lock of a dead process ended after ${took} ms`)
        assert.ok(next.fencingToken > token)
        assert.equal(await next.release(), true)
        assert.ok(held.isHeld)
        assert.equal((await b.inspect('held'))?.fencingToken, held.fencingToken)
      }
      assert.equal(await held.release(), true)
      const next = await wait
      assert.ok(next.fencingToken > held.fencingToken)
      assert.equal(await next.release(), true)
    })

    test('all members restart: a lock is kept, and renewed again', async (connect) => {
      const a = await connect()
      const held = await a.acquire('n', { ttlMs: 30_000 })
      await Promise.all(cluster.members.map((member) => member.kill()))
      await sleep(500)
      await Promise.all(cluster.members.map((member) => member.restart()))
      await cluster.leader()
      let info
      while (!info) info = await a.inspect('n').catch(() => null)
      assert.equal(info.fencingToken, held.fencingToken)
      while (
        !(await held.extend(30_000).then(
          () => true,
          () => false,
        ))
      )
        assert.ok(held.isHeld)
      assert.equal(await held.release(), true)
    })
  })
}
