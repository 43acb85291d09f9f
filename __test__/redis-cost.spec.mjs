// The cost of the queue in Redis: commands while calls wait, commands per hand-off, and the keys that are left.
import assert from 'node:assert/strict'
import { WaiterProcesses, labels } from './waiter-processes.mjs'
import { Monitor } from '../scripts/monitor.mjs'
import { proxySuite } from './proxy.mjs'
import { commandCounts } from './redis-client.mjs'
import { sleep, until, waiting } from './tools.mjs'

/** The only key that stays: the last fencing token. */
const LAST = 'holdfast:last'

/** Returns how many scripts the server has run. */
const scriptRuns = async (redis) => (await commandCounts(redis)).evalsha ?? 0

/** Starts `each` waiters for `n` in each of `processes` processes. */
async function gather(t, { server, options }, { processes, each, ...acquireOptions }) {
  const waiters = new WaiterProcesses(t, { url: server.url, options })
  const children = await waiters.processes(processes)
  const expected = []
  for (let index = 0; index < processes * each; index++) {
    expected.push(`w${index}`)
    await waiters.enqueue(children[index % processes], `w${index}`, acquireOptions)
  }
  return { waiters, expected }
}

proxySuite('redis', 'what waiting costs', { serverPerTest: true }, (test) => {
  test('100 waiters in 4 processes send less than one command per process and second', async ({
    direct,
    ...fixture
  }, t) => {
    // With the default ttl: its renewals are counted, too.
    const held = await direct.acquire('n')
    const { waiters, expected } = await gather(t, fixture, { processes: 4, each: 25 })
    const monitor = await Monitor.open(fixture.server.port)
    const [before, scripts] = [direct.stats().renewed, await scriptRuns(waiters.recorder.redis)]
    monitor.reset()
    await sleep(10_000)
    const sent = monitor.commands.filter((command) => !/^"info"/i.test(command))
    assert.ok(sent.length < 4 * 10, `${sent.length} commands in 10 s: ${sent.slice(0, 5).join('; ')}`)
    const ran = (await scriptRuns(waiters.recorder.redis)) - scripts
    assert.ok(ran < 4 * 10, `${ran} scripts in 10 s`)
    // The heartbeats were counted.
    assert.ok(ran >= 4, `${ran} scripts in 10 s`)
    await until('a renewal', () => direct.stats().renewed > before)
    monitor.close()
    assert.equal(await held.release(), true)
    await waiters.assertServed(expected)
  })

  test('a hand-off costs at most 6 commands, for any number of waiters', async ({ server, direct, connect }) => {
    const locks = await connect({}, server.port)
    const perHandOff = []
    const monitor = await Monitor.open(server.port)
    for (const count of [1, 10, 100]) {
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
      perHandOff.push(monitor.commands.length / count)
    }
    monitor.close()
    // The release with the hand-off and the confirmation; one more release at the end, and heartbeats.
    for (const commands of perHandOff) assert.ok(commands <= 6, `${perHandOff} commands`)
    // Independent of the number of waiters, apart from one or two heartbeats.
    assert.ok(perHandOff[2] <= perHandOff[0] + 1, `${perHandOff} commands`)
  })

  test('a hand-off between processes costs at most 3 commands', async ({ server, direct, ...fixture }, t) => {
    const held = await direct.acquire('n')
    const { waiters, expected } = await gather(t, { server, ...fixture }, { processes: 4, each: 10 })
    const monitor = await Monitor.open(server.port)
    assert.equal(await held.release(), true)
    await waiters.assertServed(expected)
    await waiters.assertUnused()
    // Without the records that the test's waiters write.
    const sent = monitor.commands.filter((command) => /^"(eval|evalsha|publish|(un)?subscribe)"/i.test(command))
    monitor.close()
    assert.ok(sent.length / expected.length <= 3, `${sent.length} commands for ${expected.length} hand-offs`)
  })

  test('all keys of a queue have a ttl, and are removed when all waiters are served', async ({
    server,
    direct,
    ...fixture
  }, t) => {
    const held = await direct.acquire('n')
    const { waiters, expected } = await gather(t, { server, ...fixture }, { processes: 2, each: 10 })
    const ttls = async () => {
      const keys = (await waiters.recorder.redis.keys('*')).filter((key) => !key.startsWith('waiters_'))
      return Object.fromEntries(
        await Promise.all(keys.map(async (key) => [key, await waiters.recorder.redis.pttl(key)])),
      )
    }
    const waitingTtls = await ttls()
    assert.deepEqual(
      Object.keys(waitingTtls).sort(),
      [
        waiters.recorder.key('n'),
        waiters.recorder.queueKey('n'),
        `holdfast:fence:{${waiters.recorder.key('n')}}`,
        LAST,
      ].sort(),
    )
    for (const [key, ttl] of Object.entries(waitingTtls)) assert.ok(ttl > 0 || key === LAST, `${key}: ${ttl}`)
    // Little more than a minute after the last heartbeat, if all processes died.
    assert.ok(waitingTtls[waiters.recorder.queueKey('n')] <= 70_000)
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
    assert.equal(await waiters.recorder.redis.dbsize(), 3 * names.length + 1)
    await Promise.all(held.map((lock) => lock.release()))
    await Promise.all(calls)
    assert.deepEqual(await waiters.recorder.redis.keys('*'), [LAST])
  })
})
