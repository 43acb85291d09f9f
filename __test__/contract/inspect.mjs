// Reading from outside: inspect, list, forceRelease, stats, onEvent.
import assert from 'node:assert/strict'
import { hostname } from 'node:os'
import { assertFree, rejection, rejects, sleep, until, waiting } from '../tools.mjs'

const byBytes = (names) => names.sort((x, y) => Buffer.compare(Buffer.from(x), Buffer.from(y)))

export function inspect(test) {
  test('inspect returns the holder of a name', async (store) => {
    const [a, b] = await store.connectAll(2)
    assert.equal(await a.inspect('seen'), null)
    const began = Date.now()
    const lock = await a.acquire('seen', { ttlMs: 20_000, metadata: { why: 'test' } })
    const longest = store.lasting(20_000)
    for (const service of [a, b]) {
      const info = await service.inspect('seen')
      const members = ['fencingToken', 'holder', 'metadata', 'name', 'remainingMs', 'waiting']
      assert.deepEqual(Object.keys(info).sort(), members)
      assert.equal(info.name, 'seen')
      assert.ok(info.remainingMs > longest / 2 && info.remainingMs <= longest, `${info.remainingMs} ms`)
      assert.equal(info.fencingToken, lock.fencingToken)
      assert.equal(info.holder.host, hostname())
      assert.equal(info.holder.pid, process.pid)
      assert.ok(info.holder.since instanceof Date)
      assert.ok(Math.abs(info.holder.since.getTime() - began) < 60_000, 'clocks of one machine')
      assert.deepEqual(info.metadata, { why: 'test' })
    }
    assert.equal(await lock.release(), true)
    assert.equal(await b.inspect('seen'), null)
  })

  test('inspect and list count the waiting calls of all services', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('counted')
    const isCounted = async (count) => {
      const expected = store.ordered ? count : null
      // In a cluster, the waiting call for two names may hold `free`.
      const listed = (await b.list()).filter(({ name }) => name === 'counted')
      const infos = [await a.inspect('counted'), ...listed]
      return infos.length === 2 && infos.every((info) => info?.waiting === expected)
    }
    assert.ok(await isCounted(0))
    const controller = new AbortController()
    const options = { waitMs: 60_000 }
    const aborted = rejection(a.acquire('counted', { ...options, signal: controller.signal }))
    await waiting(a, 1)
    const seen = []
    const see = async () => void seen.push((await a.inspect('counted')).waiting)
    // A call for several names waits for one of them.
    const calls = ['counted', ['counted', 'free']].map((names) => b.using(names, options, see))
    await waiting(b, 2)
    await until('three waiting calls', () => isCounted(3))
    controller.abort()
    await aborted
    await until('two waiting calls', () => isCounted(2))
    assert.equal(await lock.release(), true)
    await Promise.all(calls)
    assert.deepEqual(seen, store.ordered ? [1, 0] : [null, null])
  })

  test('inspect and list omit expired locks', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lock = await a.acquire('expired', { ttlMs: 300, renew: false })
    await until('the loss', () => !lock.isHeld)
    // The local lease ends some milliseconds before the store's.
    await until('it is omitted', async () => (await b.inspect('expired')) === null)
    assert.deepEqual(await b.list(), [])
    assert.equal(await b.forceRelease('expired'), false)
  })

  test('holder.since is unchanged by a renewal', async (store) => {
    const a = await store.connect()
    const lock = await a.acquire('since', { ttlMs: 4000 })
    const { since } = (await a.inspect('since')).holder
    await until('a renewal', () => a.stats().renewed > 0)
    assert.deepEqual((await a.inspect('since')).holder.since, since)
    assert.equal(await lock.release(), true)
  })

  test('list returns all held locks in byte order', async (store) => {
    const [a, b] = await store.connectAll(2)
    assert.deepEqual(await a.list(), [])
    // UTF-16 would sort the emoji, a surrogate pair, before U+FF5E.
    const names = byBytes(['A', 'B', 'a', 'a\n', 'a ', 'aa', 'b', 'é', '～', '🔒', '鎖'])
    const locks = await Promise.all([...names].reverse().map((name, i) => (i % 2 ? a : b).acquire(name)))
    for (const options of [undefined, {}, { prefix: '' }, { prefix: undefined }]) {
      assert.deepEqual(
        (await b.list(options)).map((info) => info.name),
        names,
      )
    }
    const tokens = new Map(locks.map((lock) => [lock.name, lock.fencingToken]))
    for (const info of await a.list()) assert.equal(info.fencingToken, tokens.get(info.name))
  })

  test('list treats its prefix as literal text', async (store) => {
    const [a, b] = await store.connectAll(2)
    const names = [
      'p',
      'pq',
      'P',
      'p*',
      'p*x',
      'p?',
      'p[q]',
      'p%',
      'p%x',
      'p_',
      'p_x',
      'p\\',
      'p\\x',
      'p.',
      'p.x',
      'p^',
      'p$',
      'p{}',
      'p|q',
      "p'",
      'p"',
      'p\n',
      'é',
      'e',
      '🔒x',
      '🔓x',
    ]
    await Promise.all(names.map((name) => a.acquire(name)))
    const others = ['pq*', 'p.*', '^p', '%', '_', '*', '?', '.', '\\', 'nothing', 'p[', 'p[^x]', 'p{', 'px', '']
    for (const prefix of [...names, ...others]) {
      const expected = byBytes(names.filter((name) => name.startsWith(prefix)))
      assert.deepEqual(
        (await b.list({ prefix })).map((info) => info.name),
        expected,
        JSON.stringify(prefix),
      )
    }
  })

  test('list returns hundreds of locks, and the event loop runs between pages', async (store) => {
    const [a, b] = await store.connectAll(2)
    const names = Array.from({ length: 1100 }, (_, i) => `n:${String(i).padStart(4, '0')}`)
    const locks = []
    const { mostNames = 100 } = store
    for (let i = 0; i < 1100; i += mostNames) locks.push(await a.acquire(names.slice(i, i + mostNames)))
    assert.deepEqual(
      (await b.list({ prefix: 'n:' })).map((info) => info.name),
      names,
    )
    const pages = new Map()
    let [ticks, isIterated] = [0, false]
    const tick = () => isIterated || (ticks++, setImmediate(tick))
    tick()
    for await (const { name } of b.list({ prefix: 'n:' })) pages.set(ticks, [...(pages.get(ticks) ?? []), name])
    isIterated = true
    assert.deepEqual([...pages.values()].flat(), names)
    // Of six pages, one wake-up of a machine that stood still may deliver several.
    assert.ok(pages.size >= 2, 'all pages came in one tick')
    for await (const { name } of b.list({ prefix: 'n:' })) {
      assert.equal(name, names[0])
      break
    }
    for (const lock of locks) assert.equal(await lock.release(), true)
    for await (const { name } of b.list({ prefix: 'n:' })) assert.fail(name)
    // A failure before the first `next()` is no unhandled rejection.
    await b.close()
    const late = b.list()[Symbol.asyncIterator]()
    await sleep(20)
    assert.equal((await rejection(late.next())).code, 'LOCK_CLOSED')
  })

  test('forceRelease releases every kind of lock', async (store) => {
    const [a, b] = await store.connectAll(2)
    assert.equal(await b.forceRelease('forced'), false)
    for (const acquire of [() => a.acquire('forced', { renew: false }), () => a.acquireLock('forced', 60)]) {
      await acquire()
      assert.equal(await b.forceRelease('forced'), true)
      assert.equal(await b.forceRelease('forced'), false)
      await assertFree(b, 'forced')
    }
    const own = await a.acquire('own')
    assert.equal(await a.forceRelease('own'), true)
    assert.equal(await own.release(), false)
  })

  test('stats counts calls and leases', async (store) => {
    const [a, b] = await store.connectAll(2)
    const zero = { held: 0, waiting: 0, acquired: 0, busy: 0, released: 0, renewed: 0, lost: 0, storeErrors: 0 }
    assert.deepEqual(b.stats(), zero)
    const theirs = await a.acquire('counted')
    assert.equal(await b.tryAcquire('counted'), null)
    assert.equal(await b.acquireLock('counted'), false)
    await rejects(b.acquire('counted', { waitMs: 30 }), 'LOCK_TIMEOUT')
    assert.deepEqual(b.stats(), { ...zero, busy: 3 })
    const next = b.acquire('counted')
    await waiting(b, 1)
    await theirs.release()
    const lock = await next
    assert.deepEqual(b.stats(), { ...zero, busy: 3, held: 1, acquired: 1 })
    await lock.release()
    await b.acquireLock('gist')
    await b.releaseLock('gist')
    await b.using('used', () => {})
    assert.deepEqual(b.stats(), { ...zero, busy: 3, acquired: 3, released: 3 })
    const lost = await b.acquire('lost', { ttlMs: 4000 })
    await until('a renewal', () => b.stats().renewed === 1)
    await a.forceRelease('lost')
    await until('the loss', () => !lost.isHeld)
    // On a loaded machine a renewal may be too slow for such a short ttl, and is retried.
    const { renewed, storeErrors, ...rest } = b.stats()
    assert.ok(renewed >= 1 && storeErrors <= 2, `${renewed} ${storeErrors}`)
    assert.deepEqual({ ...zero, ...rest }, { ...zero, busy: 3, acquired: 4, released: 3, lost: 1 })
    assert.deepEqual(a.stats(), { ...zero, acquired: 1, released: 1 })
  })

  test('onEvent is called for every lease', async (store) => {
    const seen = []
    const a = await store.connect()
    const b = await store.connect({ onEvent: (event) => seen.push(event) })
    const times = (event, field) => {
      assert.equal(typeof event[field], 'number')
      assert.ok(event[field] >= 0)
      return { ...event, [field]: 0 }
    }
    const next = async (type) => {
      const event = await until(type, () => seen.shift())
      assert.equal(event.type, type)
      return event
    }

    const theirs = await a.acquire('watched')
    const wait = b.acquire(['watched', 'other'], { ttlMs: 4500 })
    const names = ['watched', 'other']
    const { engine, ...waits } = await next('waiting')
    assert.match(engine, /^[a-z]+/)
    assert.deepEqual(waits, { type: 'waiting', name: 'watched', names })
    await theirs.release()
    const lock = await wait
    const granted = performance.now()
    const common = { engine, name: 'watched', names, fencingToken: lock.fencingToken }
    assert.deepEqual(times(await next('acquired'), 'waitedMs'), { type: 'acquired', ...common, waitedMs: 0 })
    assert.deepEqual(await next('renewed'), { type: 'renewed', ...common })
    const held = performance.now() - granted
    assert.equal(await lock.release(), true)
    const released = await until('released', () => seen.find((event) => event.type === 'released'))
    assert.deepEqual(times(released, 'heldMs'), { type: 'released', ...common, heldMs: 0 })
    assert.ok(released.heldMs >= held - 1, `${released.heldMs} ms, at least ${held}`)

    seen.length = 0
    const forced = await b.acquire('lost', { ttlMs: 1000, renew: false })
    await next('acquired')
    const lost = times(await next('lost'), 'heldMs')
    assert.equal(typeof lost.reason, 'string')
    const expected = {
      type: 'lost',
      engine,
      name: 'lost',
      names: ['lost'],
      fencingToken: forced.fencingToken,
      heldMs: 0,
    }
    assert.deepEqual(lost, { ...expected, reason: lost.reason })
    assert.match(lost.reason, /lost/)
    assert.equal(await forced.release(), false)
    assert.deepEqual(seen, [])
  })

  test('onEvent is called for the gist’s functions', async (store) => {
    const seen = []
    const a = await store.connect({ onEvent: ({ type, name }) => seen.push(`${type} ${name}`) })
    await a.acquireLock('g1')
    await a.releaseLock('g1')
    await a.acquireAndExecute('g2', () => {})
    await a.using('g3', () => {})
    await a.acquireLock('g4')
    await a.close()
    const both = (name) => [`acquired ${name}`, `released ${name}`]
    await until('all events', () => seen.length >= 8)
    assert.deepEqual(seen, [...both('g1'), ...both('g2'), ...both('g3'), ...both('g4')])
  })
}
