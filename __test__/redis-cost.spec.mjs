// What the queue in Redis costs the server: commands while it waits, commands per hand-off, and what is left in the end.
import assert from 'node:assert/strict'
import { WaiterProcesses, named } from './waiter-processes.mjs'
import { Monitor } from '../scripts/monitor.mjs'
import { proxySuite } from './proxy.mjs'
import { sleep, until, waiting } from './tools.mjs'

/** The one key that is there to stay: the last token of all. */
const LAST = 'holdfast:last'

/** How often the server has carried out a command that only clients send. */
async function count(redis, command) {
  const stats = await redis.info('commandstats')
  return Number(new RegExp(`^cmdstat_${command}:calls=(\\d+)`, 'm').exec(stats)?.[1] ?? 0)
}

/** Who waits in `n`, so many in each of some processes. */
async function gather(t, { server, options }, { processes, each, ...order }) {
  const all = new WaiterProcesses(t, { url: server.url, options })
  const children = await all.processes(processes)
  const expected = []
  for (let index = 0; index < processes * each; index++) {
    expected.push(`w${index}`)
    await all.enqueue(children[index % processes], `w${index}`, order)
  }
  return { all, expected }
}

proxySuite('redis', 'what waiting costs', { serverPerTest: true }, (test) => {
  test('100 waiters of 4 processes send less than one command per process and second', async ({ direct, ...fixture }, t) => {
    // With the default ttl: its renewals are among what is counted.
    const held = await direct.acquire('n')
    const { all, expected } = await gather(t, fixture, { processes: 4, each: 25 })
    const monitor = await Monitor.open(fixture.server.port)
    const [before, scripts] = [direct.stats().renewed, await count(all.ledger.redis, 'evalsha')]
    monitor.reset()
    await sleep(10_000)
    const sent = monitor.commands.filter((command) => !/^"info"/i.test(command))
    assert.ok(sent.length < 4 * 10, `${sent.length} commands in 10 s: ${sent.slice(0, 5).join('; ')}`)
    const ran = (await count(all.ledger.redis, 'evalsha')) - scripts
    assert.ok(ran < 4 * 10, `${ran} scripts in 10 s`)
    // It is alive signs that were counted, and no silence.
    assert.ok(ran >= 4, `${ran} scripts in 10 s`)
    await until('a renewal', () => direct.stats().renewed > before)
    monitor.close()
    assert.equal(await held.release(), true)
    await all.serves(expected)
  })

  test('a hand-off costs a few commands, however many wait', async ({ server, direct, connect }) => {
    const locks = await connect({}, server.port)
    const perHandOff = []
    const monitor = await Monitor.open(server.port)
    for (const crowd of [1, 10, 100]) {
      const held = await direct.acquire('n')
      const turns = Array.from({ length: crowd }, () => locks.using('n', { waitMs: 60_000 }, () => {}))
      await waiting(locks, crowd)
      // What the last ones sent on their way into the queue is told by now.
      await direct.inspect('n')
      await until('all was told', () => monitor.commands.length >= crowd)
      await sleep(100)
      monitor.reset()
      await held.release()
      await Promise.all(turns)
      await sleep(100)
      perHandOff.push(monitor.commands.length / crowd)
    }
    monitor.close()
    // The release that hands on and the confirmation: one more release in the end, and the signs of life.
    for (const commands of perHandOff) assert.ok(commands <= 6, `${perHandOff} commands`)
    // Flat in the number of waiters: a sign of life or two may fall into a run.
    assert.ok(perHandOff[2] <= perHandOff[0] + 1, `${perHandOff} commands`)
  })

  test('a hand-off between processes costs no more', async ({ server, direct, ...fixture }, t) => {
    const held = await direct.acquire('n')
    const { all, expected } = await gather(t, { server, ...fixture }, { processes: 4, each: 10 })
    const monitor = await Monitor.open(server.port)
    assert.equal(await held.release(), true)
    await all.serves(expected)
    await all.isOver()
    // What the waiters write down in the store is the test's business.
    const sent = monitor.commands.filter((command) => /^"(eval|evalsha|publish|(un)?subscribe)"/i.test(command))
    monitor.close()
    assert.ok(sent.length / expected.length <= 3, `${sent.length} commands for ${expected.length} hand-offs`)
  })

  test('what a queue leaves has a ttl, and is gone when everybody was served', async ({ server, direct, ...fixture }, t) => {
    const held = await direct.acquire('n')
    const { all, expected } = await gather(t, { server, ...fixture }, { processes: 2, each: 10 })
    const ttls = async () => {
      const keys = (await all.ledger.redis.keys('*')).filter((key) => !key.startsWith('crowd_'))
      return Object.fromEntries(await Promise.all(keys.map(async (key) => [key, await all.ledger.redis.pttl(key)])))
    }
    const waitingTtls = await ttls()
    assert.deepEqual(
      Object.keys(waitingTtls).sort(),
      [all.ledger.key('n'), all.ledger.queueKey('n'), `holdfast:fence:{${all.ledger.key('n')}}`, LAST].sort(),
    )
    for (const [key, ttl] of Object.entries(waitingTtls)) assert.ok(ttl > 0 || key === LAST, `${key}: ${ttl}`)
    // Little more than a minute after the last sign of life, if everybody died.
    assert.ok(waitingTtls[all.ledger.queueKey('n')] <= 70_000)
    assert.equal(await held.release(), true)
    await all.serves(expected)
    assert.deepEqual(Object.keys(await ttls()), [LAST])
  })

  test('a thousand names that were waited for leave nothing but the last token of all', async ({ server, direct, connect, options }, t) => {
    const all = new WaiterProcesses(t, { url: server.url, options })
    const locks = await connect({}, server.port)
    const names = named('n', 1000)
    const held = await Promise.all(names.map((name) => direct.acquire(name)))
    const turns = names.map((name) => locks.using(name, { waitMs: 60_000 }, () => {}))
    await waiting(locks, names.length)
    assert.equal(await all.ledger.redis.dbsize(), 3 * names.length + 1)
    await Promise.all(held.map((lock) => lock.release()))
    await Promise.all(turns)
    assert.deepEqual(await all.ledger.redis.keys('*'), [LAST])
  })
})
