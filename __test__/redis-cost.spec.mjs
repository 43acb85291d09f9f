// The cost of the queue in Redis: commands while calls wait, commands per hand-off, and the keys that are left.
import assert from 'node:assert/strict'
import { WaiterProcesses, labels } from './waiter-processes.mjs'
import { Monitor } from '../scripts/monitor.mjs'
import { proxySuite } from './proxy.mjs'
import { commandCounts } from './redis-client.mjs'
import { sleep, stallwatch, until, waiting } from './tools.mjs'

/** The only key that stays: the last fencing token. */
const LAST = 'holdfast:last'

/** Whether a command extends a lease, which happens when the lock is still held 10 ms after its hand-off: on a slow machine. */
const isRenewal = (/** @type {string} */ command) => / "3660000" "[0-9a-f]{32}" "\d+" "1"/.test(command)

/** Returns how many scripts the server has run. */
const scriptRuns = async (redis) => (await commandCounts(redis)).evalsha ?? 0

proxySuite('redis', 'what waiting costs', { serverPerTest: true }, (test) => {
  test('100 waiters in 4 processes send less than one command per process and second', async ({
    server,
    direct,
    options,
  }, t) => {
    // With the default ttl: its renewals are counted, too.
    const held = await direct.acquire('n')
    const waiters = new WaiterProcesses(t, { url: server.url, options })
    const expected = await waiters.gather(4, 25)
    const monitor = await Monitor.open(server.port)
    const [before, scripts] = [direct.stats().renewed, await scriptRuns(waiters.redis.redis)]
    monitor.reset()
    await sleep(10_000)
    const sent = monitor.commands.filter((command) => !/^"info"/i.test(command))
    assert.ok(sent.length < 4 * 10, `${sent.length} commands in 10 s: ${sent.slice(0, 5).join('; ')}`)
    const ran = (await scriptRuns(waiters.redis.redis)) - scripts
    assert.ok(ran < 4 * 10, `${ran} scripts in 10 s`)
    // The heartbeats were counted.
    assert.ok(ran >= 4, `${ran} scripts in 10 s`)
    await until('a renewal', () => direct.stats().renewed > before)
    monitor.close()
    assert.equal(await held.release(), true)
    await waiters.assertServed(expected)
  })

  test('a hand-off costs one command, for any number of waiters', async ({ server, direct, connect }) => {
    const locks = await connect({}, server.port)
    const perHandOff = []
    const monitor = await Monitor.open(server.port)
    const measure = async (count) => {
      const held = await direct.acquire('n')
      const calls = Array.from({ length: count }, () => locks.using('n', { waitMs: 60_000 }, () => {}))
      await waiting(locks, count)
      // The monitor has received the commands of the last waiters by then.
      await direct.inspect('n')
      await until('the monitor has all commands', () => monitor.commands.length >= count)
      await sleep(100)
      monitor.reset()
      await held.release()
      await Promise.all(calls)
      await sleep(100)
      return monitor.commands.filter((command) => !isRenewal(command)).length / count
    }
    for (const count of [1, 10, 100]) {
      let [measured, attempts, isStalled] = [0, 0, true]
      // Waiters of a machine that stands still send more: it is measured again.
      for (; isStalled && attempts < 5; attempts++) {
        const stalledMs = stallwatch()
        monitor.reset()
        measured = await measure(count)
        isStalled = stalledMs() > 250
      }
      perHandOff.push(measured)
    }
    monitor.close()
    // The release, which grants; one more release at the end, and heartbeats.
    const [one, ten, hundred] = perHandOff
    assert.ok(one >= 1 && one <= 5, `${perHandOff} commands`)
    assert.ok(ten >= 1 && ten <= 2, `${perHandOff} commands`)
    assert.ok(hundred >= 1 && hundred <= 1.5, `${perHandOff} commands`)
  })

  test('a hand-off between processes costs one command', async ({ server, direct, options }, t) => {
    const held = await direct.acquire('n')
    const waiters = new WaiterProcesses(t, { url: server.url, options })
    const expected = await waiters.gather(4, 10)
    const monitor = await Monitor.open(server.port)
    assert.equal(await held.release(), true)
    await waiters.assertServed(expected)
    await waiters.assertUnused()
    // Without the records that the test's waiters write.
    const isCounted = (/** @type {string} */ command) => /^"(eval|evalsha|publish|(un)?subscribe)"/i.test(command)
    const sent = monitor.commands.filter((command) => isCounted(command) && !isRenewal(command))
    monitor.close()
    const perHandOff = sent.length / expected.length
    assert.ok(perHandOff >= 1 && perHandOff <= 1.5, `${sent.length} commands for ${expected.length} hand-offs`)
  })

  test('all keys of a queue have a ttl, and are removed when all waiters are served', async ({
    server,
    direct,
    options,
  }, t) => {
    const held = await direct.acquire('n')
    const waiters = new WaiterProcesses(t, { url: server.url, options })
    const expected = await waiters.gather(2, 10)
    const ttls = async () => {
      const keys = (await waiters.redis.redis.keys('*')).filter((key) => !key.startsWith('waiters_'))
      return Object.fromEntries(await Promise.all(keys.map(async (key) => [key, await waiters.redis.redis.pttl(key)])))
    }
    const waitingTtls = await ttls()
    assert.deepEqual(
      Object.keys(waitingTtls).sort(),
      [
        waiters.recorder.key('n'),
        waiters.redis.queueKey('n'),
        `holdfast:fence:{${waiters.recorder.key('n')}}`,
        LAST,
      ].sort(),
    )
    for (const [key, ttl] of Object.entries(waitingTtls)) assert.ok(ttl > 0 || key === LAST, `${key}: ${ttl}`)
    // Little more than a minute after the last heartbeat, if all processes died.
    assert.ok(waitingTtls[waiters.redis.queueKey('n')] <= 70_000)
    assert.equal(await held.release(), true)
    await waiters.assertServed(expected)
    assert.deepEqual(Object.keys(await ttls()), [LAST])
  })

  test('a thousand names with waiters leave only the last fencing token', async ({
    server,
    direct,
    connect,
    options,
  }, t) => {
    const waiters = new WaiterProcesses(t, { url: server.url, options })
    const locks = await connect({}, server.port)
    const names = labels('n', 1000)
    const held = await Promise.all(names.map((name) => direct.acquire(name)))
    const calls = names.map((name) => locks.using(name, { waitMs: 60_000 }, () => {}))
    await waiting(locks, names.length)
    assert.equal(await waiters.redis.redis.dbsize(), 3 * names.length + 1)
    await Promise.all(held.map((lock) => lock.release()))
    await Promise.all(calls)
    assert.deepEqual(await waiters.redis.redis.keys('*'), [LAST])
  })
})
