// Elections through outages of the store, and the process that waits for one.
import assert from 'node:assert/strict'
import { LockService } from '../index.js'
import { redisCommand } from '../scripts/redis-command.mjs'
import { withMysql } from './mysql-client.mjs'
import { withPostgres } from './postgres-client.mjs'
import { SERVERS, proxySuite } from './proxy.mjs'
import { openRedis } from './redis-client.mjs'
import { assertFree, assertGrowing, INDEX, rejection, rejects, runNode, sleep, until } from './tools.mjs'
import { random, serverUrl, suite } from './stores.mjs'

/** Resolves when a signal aborts. @param {import('../index.js').Signal} signal */
const aborted = (signal) => new Promise((resolve) => signal.addEventListener('abort', resolve))

/** A user of each kind of server: how another tool creates it, and how its login is refused and accepted again. */
const USERS = {
  redis: {
    run: redisCommand,
    create: 'ACL SETUSER candidate on >secret ~* &* +@all',
    refuse: 'ACL SETUSER candidate off',
    accept: 'ACL SETUSER candidate on',
  },
  postgres: {
    run: (port, text) => withPostgres(SERVERS.postgres.url(port), (client) => client.query(text)),
    create: 'CREATE ROLE candidate SUPERUSER LOGIN',
    refuse: 'ALTER ROLE candidate NOLOGIN',
    accept: 'ALTER ROLE candidate LOGIN',
  },
  mysql: {
    run: (port, text) => withMysql(SERVERS.mysql.url(port), (client) => client.query(text)),
    create: "CREATE USER candidate IDENTIFIED BY 'secret'; GRANT ALL ON holdfast.* TO candidate",
    refuse: "ALTER USER candidate IDENTIFIED BY 'another'",
    accept: "ALTER USER candidate IDENTIFIED BY 'secret'",
  },
}

for (const kind of /** @type {const} */ ([
  'redis',
  'mongodb',
  'mongodb-replica-set',
  'postgres',
  'mysql',
  'etcd',
  'zookeeper',
])) {
  proxySuite(kind, 'elections', {}, (test) => {
    const user = Object(USERS)[kind]
    if (user) {
      test('a login that is refused after a restart of the store ends no election', async ({
        direct,
        options,
        proxy,
        server,
      }, t) => {
        await user.run(server.port, user.create)
        const url = SERVERS[kind].url(proxy.port).replace(/:\/\/(.*@)?/, '://candidate:secret@')
        const locks = await LockService.connect(url, { ...options, storeTimeoutMs: 4000 })
        t.after(() => locks.close())
        const errors = /** @type {any[]} */ ([])
        const terms = /** @type {bigint[]} */ ([])
        /** @type {import('../index.js').ElectOptions} */
        const how = { ttlMs: '2s', restart: true, onError: (error) => void errors.push(error) }
        const leads = locks.elect('leader', how, ({ signal, term }) => {
          terms.push(term)
          return aborted(signal)
        })
        const held = await direct.acquire('held')
        const waits = locks.elect('held', how, ({ signal }) => aborted(signal))
        await until('a leader', () => leads.isLeader && locks.stats().waiting === 1)
        await user.run(server.port, user.refuse)
        await proxy.down()
        await proxy.up()
        // One of the leader, after the end of its lease, and one of the candidate.
        await until('errors', () => errors.length >= 2)
        await sleep(1000)
        assert.deepEqual(
          errors.map(({ code, retryable }) => [code, retryable]),
          Array(2).fill(['LOCK_STORE', false]),
        )
        await held.release()
        await user.run(server.port, user.accept)
        await until('leaders', () => leads.isLeader && waits.isLeader)
        assert.ok(terms.length >= 2)
        assertGrowing(terms)
        await Promise.all([leads.stop(), waits.stop()])
        await Promise.all([leads.done, waits.done])
      })
    }

    test('an outage of 8 s ends a leadership of 4 s, and no election', async ({ connect, direct, proxy }) => {
      const locks = await connect({ storeTimeoutMs: 1500 })
      const terms = /** @type {bigint[]} */ ([])
      const reasons = /** @type {string[]} */ ([])
      const elect = (ttlMs) =>
        locks.elect(`leader:${ttlMs}`, { ttlMs }, async ({ signal, term }) => {
          terms.push(term)
          await aborted(signal)
          reasons.push(signal.reason.code)
        })
      const [short, long] = [elect('4s'), elect('60s')]
      await until('leaders', () => short.isLeader && long.isLeader)
      const { term } = long
      const watched = direct.watch('leader:4s', { intervalMs: 50 })
      assert.equal((await watched.next()).value?.fencingToken, short.term)
      const waits = locks.elect('new', ({ signal }) => aborted(signal))
      await until('a third leader', () => waits.isLeader)
      await waits.resign()
      await proxy.down()
      await sleep(8000)
      assert.deepEqual([short.isLeader, long.isLeader, reasons], [false, true, ['LOCK_LOST']])
      await proxy.up()
      await until('the leader again', () => short.isLeader && waits.isLeader)
      assert.equal(long.term, term)
      const last = short.term ?? assert.fail('it does not lead')
      assertGrowing([terms[0], last])
      let seen
      do seen = (await watched.next()).value
      while (seen?.fencingToken !== last)
      await watched.return?.()
      await Promise.all([short.stop(), long.stop(), waits.stop()])
    })

    test('a lazy service is a candidate before the store is there', async ({ connect, proxy }) => {
      await proxy.down()
      const locks = await connect({ storeTimeoutMs: 500, lazy: true })
      const election = locks.elect('leader', ({ signal }) => aborted(signal))
      await sleep(1200)
      await proxy.up()
      await until('a leader', () => election.isLeader)
      const closing = locks.close({ drainMs: '60s' })
      await election.done
      await closing
    })

    test('the period of a job continues through an outage at its end', async ({ connect, direct, proxy }) => {
      // On ZooKeeper leases end with the session.
      const session = kind === 'zookeeper' ? { sessionTimeoutMs: 8000 } : {}
      const locks = await connect({ storeTimeoutMs: 4000, ...session })
      let runs = 0
      let end
      const ended = new Promise((resolve) => (end = resolve))
      const job = (name, ttlMs) =>
        locks.oncePer(name, { periodMs: '1h', ttlMs }, () => {
          runs++
          return ended
        })
      const jobs = [job('short', '4500ms'), job('long', '30s')]
      await until('the jobs', () => runs === 2)
      await proxy.down()
      end()
      assert.deepEqual(await Promise.all(jobs), Array(2).fill({ ran: true, value: undefined }))
      await until('the end of the short lease', async () => (await direct.inspect('short')) === null)
      await proxy.up()
      for (const name of ['short', 'long'])
        await until(name, async () => ((await direct.inspect(name))?.remainingMs ?? 0) > 60_000)
      await locks.close()
      for (const name of ['short', 'long']) {
        const { ran } = await direct.oncePer(name, { periodMs: '1h', waitMs: 0 }, () => assert.fail('it ran twice'))
        assert.equal(ran, false)
        await direct.forceRelease(name)
      }
    })

    test('watch reads the name only while next() waits', async ({ connect, direct, key, proxy }) => {
      const locks = await connect()
      let reads = 0
      proxy.intercept = (data) => {
        reads += Number([key('watched')].flat().some((text) => data.includes(text)))
        return false
      }
      const watched = locks.watch('watched', { intervalMs: 20 })
      assert.equal((await watched.next()).value, null)
      const first = reads
      await sleep(400)
      assert.equal(reads, first)
      const change = watched.next()
      await until('reads', () => reads >= first + 5)
      const lock = await direct.acquire('watched')
      assert.equal((await change).value?.holder?.pid, process.pid)
      const before = reads
      await sleep(400)
      assert.equal(reads, before)
      await lock.release()
      assert.equal((await watched.next()).value, null)
      await watched.return?.()
      proxy.intercept = undefined
    })
  })
}

suite('redis', 'elections and a right that is missing for a while', (test) => {
  /** @param {(acl: (...rule: string[]) => Promise<unknown>, url: string) => Promise<void>} body */
  const withUser = async (body) => {
    const target = String(serverUrl('redis'))
    const redis = openRedis(target)
    const user = `test-${random()}`
    const acl = (...rule) => redis.call('ACL', 'SETUSER', user, ...rule)
    try {
      await acl('on', '>secret', '~*', '&*', '+@all')
      const url = Object.assign(new URL(target), { username: user, password: 'secret' })
      await body(acl, String(url))
    } finally {
      await redis.call('ACL', 'DELUSER', user)
      await redis.quit()
    }
  }

  test('restart lives through it, with one report until the next leadership', async ({ options }, t) => {
    await withUser(async (acl, url) => {
      const locks = await LockService.connect(url, options)
      t.after(() => locks.close())
      const errors = []
      const terms = []
      const onError = (error) => errors.push(error)
      const election = locks.elect('leader', { ttlMs: '2s', restart: true, onError }, ({ signal, term }) => {
        terms.push(term)
        return aborted(signal)
      })
      for (const count of [1, 2]) {
        await until('a leader', () => election.isLeader)
        await acl('-@all')
        await election.resign()
        await until('an error', () => errors.length === count)
        await sleep(1000)
        assert.deepEqual(
          errors.map(({ code, retryable }) => [code, retryable]),
          Array(count).fill(['LOCK_STORE', false]),
        )
        await acl('+@all')
      }
      await until('a leader', () => election.isLeader)
      assert.equal(terms.length, 3)
      await election.stop()
      await election.done
      // A release without the right is not repeated.
      await sleep(2000)
    })
  })
})

suite('memory', 'the process of an election', { concurrency: 2 }, (test) => {
  /** Runs a candidate in a process with nothing else to do. Resolves to what it prints, and its exit code. */
  const run = async (options, body) => {
    const { stdout, code } = await runNode(`
      import { LockService } from '${INDEX}'
      const locks = await LockService.connect('memory:')
      const aborted = (signal) => new Promise((resolve) => signal.addEventListener('abort', resolve))
      const lock = await locks.acquire('leader')
      const election = locks.elect('leader', ${JSON.stringify(options)}, async ({ signal }) => {
        console.log('leads')
        await aborted(signal)
      })
      ${body}`)
    return [...stdout.split('\n').filter(Boolean), code]
  }

  test('it lives while it waits for the leadership, and while it leads', async () => {
    const body = `
      setTimeout(() => lock.release(), 300).unref()
      const check = setInterval(() => {
        if (!election.isLeader) return
        clearInterval(check)
        setTimeout(() => locks.close({ drainMs: '5s' }), 500).unref()
      }, 20).unref()
      election.done.then(() => console.log('done'))`
    assert.deepEqual(await run({}, body), ['leads', 'done', 0])
  })

  test('it exits with unref, while it waits and while it leads', async () => {
    assert.deepEqual(
      await run({ unref: true }, `while (locks.stats().waiting === 0) await locks.ping()\nconsole.log('waits')`),
      ['waits', 0],
    )
    assert.deepEqual(
      await run({ unref: true }, `await lock.release()\nwhile (!election.isLeader) await locks.ping()`),
      ['leads', 0],
    )
  })

  test('it lives on after an election that ended with an error, and a warning says why', async () => {
    const { stdout, stderr, code } = await runNode(`
      import { LockService } from '${INDEX}'
      const locks = await LockService.connect('memory:')
      locks.elect('n'.repeat(600), () => {})
      await locks.elect('n'.repeat(600), () => {}).stop()
      locks.elect('failed', () => { throw new Error('of one term') })
      const { done } = locks.elect('handled', () => { throw new Error('handled') })
      await done.catch(() => console.log('handled'))
      while (locks.stats().released < 2) await locks.ping()
      setTimeout(() => console.log('lives'), 100)`)
    assert.deepEqual([stdout, code], ['handled\nlives\n', 0], stderr)
    assert.match(stderr, /the election of "n+" has ended: LockError \[LOCK_INVALID_ARGUMENT\]/)
    assert.match(stderr, /the election of "failed" has ended: Error: of one term/)
    assert.doesNotMatch(stderr, /Error: handled/)
  })

  test('other calls keep it alive beside an election with unref, before a lazy service has connected', async () => {
    const { stdout, code } = await runNode(`
      import { LockService } from '${INDEX}'
      const locks = await LockService.connect('redis://127.0.0.1:1', { lazy: true, connectMs: 1000 })
      locks.elect('leader', { unref: true }, () => {})
      await locks.ping().catch(({ code }) => console.log(code))`)
    assert.deepEqual([stdout, code], ['LOCK_STORE\n', 0])
  })

  test('other calls keep it alive beside an election with unref', async () => {
    const body = `
      const other = await locks.acquire('other')
      setTimeout(() => other.release(), 500).unref()
      await locks.acquire('other')
      console.log('acquired')`
    assert.deepEqual(await run({ unref: true }, body), ['acquired', 0])
  })
})

suite('memory', 'the ends of leaderships', { concurrency: 4 }, (test) => {
  test('a leader that resigns in its function, or returns at once, causes no load', async (store) => {
    const locks = await store.connect()
    const terms = { resigns: 0, returns: 0 }
    const resigns = locks.elect('resigns', { restart: true }, () => {
      terms.resigns++
      void resigns.resign()
    })
    const returns = locks.elect('returns', { restart: true }, () => void terms.returns++)
    await until('terms', () => terms.resigns >= 3 && terms.returns >= 3)
    await sleep(500)
    assert.ok(terms.resigns < 20 && terms.returns < 20, JSON.stringify(terms))
    await Promise.all([resigns.stop(), returns.stop()])
  })

  test('an error of the job during stop() is reported, unless the abort caused it', async (store) => {
    const locks = await store.connect()
    const other = new Error('another cause')
    const abortError = (options) => Object.assign(new Error('aborted', options), { name: 'AbortError' })
    const thrown = {
      own: () => new Error('from fn'),
      'its own, with a cause': () => new Error('from fn', { cause: other }),
      'its own, after the abort': (signal) => new Error('not saved', { cause: signal.reason }),
      'of another signal': () => abortError({ cause: other }),
    }
    const ends = async (name, makeError, options) => {
      const election = locks.elect(name, options, async ({ signal }) => {
        await aborted(signal)
        throw makeError(signal)
      })
      await until('a leader', () => election.isLeader)
      await election.stop()
      return election.done
    }
    for (const [name, makeError] of Object.entries(thrown)) {
      let error
      const make = (signal) => (error = makeError(signal))
      assert.equal(await rejection(ends(name, make)), error, name)
      const errors = []
      await ends(name, make, { restart: true, onError: (thrown) => errors.push(thrown) })
      assert.deepEqual(errors, [error], name)
    }
    await ends('the reason', (signal) => signal.reason)
    await ends('of Node', ({ reason }) => abortError({ cause: reason }))
    await ends('of another library', () => abortError())
  })

  test('an error of onError ends the election, also a later one', async (store) => {
    const locks = await store.connect()
    const thrown = new Error('from onError')
    const failing = () => {
      throw thrown
    }
    for (const onError of [failing, async () => failing()]) {
      const election = locks.elect('leader', { restart: true, onError }, () => Promise.reject(new Error('from fn')))
      assert.equal(await rejection(election.done), thrown)
    }
    await assertFree(locks, 'leader')
  })

  test('oncePer waits for at most half of the period, or the same tick would have two runs', async (store) => {
    const locks = await store.connect()
    const lock = await locks.acquire('job')
    // The limits of both waits pass together if the machine stands still.
    await until('the end of the shorter wait', async () => {
      const once = locks.oncePer('job', { periodMs: 200 }, () => assert.fail('the name is busy'))
      const longer = rejection(locks.acquire('job', { waitMs: 600 }))
      const isFirst = await Promise.race([once.then(() => true), longer.then(() => false)])
      await Promise.all([once, longer])
      return isFirst
    })
    await lock.release()
  })

  test("the service's minHoldMs and maxHoldMs do not apply to elect and oncePer", async (store) => {
    const locks = await store.connect({ defaults: { minHoldMs: '1h', maxHoldMs: 500 } })
    const failed = new Error('from fn')
    const job = locks.oncePer('failed', { periodMs: '1h' }, async ({ signal }) => {
      await sleep(1000)
      assert.equal(signal.aborted, false)
      throw failed
    })
    const election = locks.elect('leader', ({ signal }) => aborted(signal))
    assert.equal(await rejection(job), failed)
    await assertFree(locks, 'failed')
    assert.equal(election.isLeader, true)
    await election.stop()
    await assertFree(locks, 'leader')
    const limited = locks.oncePer('limited', { periodMs: '1h', maxHoldMs: 300 }, ({ signal }) => aborted(signal))
    await rejects(limited, 'LOCK_LOST')
    // Under the minimum hold of `assertFree`.
    store.mayLeaveLocks = true
  })
})

suite('memory', 'the arguments of elections', (test) => {
  test('a wrong argument is named', async (store) => {
    const locks = await store.connect()
    const fn = () => {}
    for (const [call, name] of /** @type {[() => unknown, string][]} */ ([
      [() => locks.elect(/** @type {any} */ (7), fn), 'name'],
      [() => locks.elect('n', /** @type {any} */ ({ waitMs: 5 }), fn), 'options'],
      [() => locks.elect('n', { ttlMs: -1 }, fn), 'ttlMs'],
      [() => locks.elect('n', /** @type {any} */ ({ restart: 1 }), fn), 'restart'],
      [() => locks.elect('n', /** @type {any} */ ({ unref: 'yes' }), fn), 'unref'],
      [() => locks.elect('n', /** @type {any} */ ({ onError: 1 }), fn), 'onError'],
      [() => locks.elect('n', /** @type {any} */ ({ signal: {} }), fn), 'signal'],
      [() => locks.elect('n', /** @type {any} */ (undefined)), 'fn'],
      [() => locks.watch(/** @type {any} */ (null)), 'name'],
      [() => locks.watch('n', { intervalMs: 0 }), 'intervalMs'],
      [() => locks.watch('n', /** @type {any} */ ({ signal: 1 })), 'signal'],
    ])) {
      assert.throws(
        call,
        (/** @type {any} */ error) => error.code === 'LOCK_INVALID_ARGUMENT' && error.message.startsWith(`${name} `),
      )
    }
    await rejects(locks.oncePer('n', /** @type {any} */ ({}), fn), 'LOCK_INVALID_ARGUMENT')
    await rejects(
      locks.oncePer('n', /** @type {any} */ ({ periodMs: '1h', minHoldMs: 1 }), fn),
      'LOCK_INVALID_ARGUMENT',
    )
    await rejects(locks.elect('n'.repeat(600), fn).done, 'LOCK_INVALID_ARGUMENT')
  })

  test('the default of an error of a leader with restart is a warning', async () => {
    const { stderr } = await runNode(`
      import { LockService } from '${INDEX}'
      const locks = await LockService.connect('memory:')
      const election = locks.elect('leader', { restart: true }, () => { throw new Error('from fn') })
      process.once('warning', () => locks.close())`)
    assert.match(stderr, /HOLDFAST_ELECTION.*the leader of "leader" failed, and is a candidate again: Error: from fn/)
    // A value without `toString`.
    const { stderr: other } = await runNode(`
      import { LockService } from '${INDEX}'
      const locks = await LockService.connect('memory:')
      locks.elect('leader', { restart: true }, () => { throw Object.create(null) })
      process.once('warning', () => locks.close())`)
    assert.match(other, /the leader of "leader" failed, and is a candidate again: an object/)
  })
})
