// What a user's function may return and throw, and what it sees.
import assert from 'node:assert/strict'
import { AsyncLocalStorage } from 'node:async_hooks'
import { runInNewContext } from 'node:vm'
import { assertFree, INDEX, output, rejection, rejects, sleep, until } from '../tools.mjs'

export function callbacks(test) {
  const ways = {
    using: (service, fn) => service.using('fn', fn),
    acquireAndExecute: (service, fn) => service.acquireAndExecute('fn', fn),
  }

  for (const [way, run] of Object.entries(ways)) {
    test(`${way}: returns what fn returns`, async (place) => {
      const [a, b] = await place.connectAll(2)
      const values = [
        undefined,
        null,
        true,
        false,
        0,
        -0,
        NaN,
        42,
        '',
        'text',
        10n,
        Symbol('s'),
        [],
        [1],
        {},
        () => {},
        class {},
        new Map(),
        new Error('returned'),
        Object.create(null),
        /x/,
        new Date(0),
        { then: 'no function' },
        new Proxy({}, {}),
      ]
      for (const value of values) {
        assert.ok(Object.is(await run(a, () => value), value), typeof value)
        assert.ok(Object.is(await run(a, async () => value), value), typeof value)
      }
      await assertFree(b, 'fn')
    })

    test(`${way}: waits for any object with a then method`, async (place) => {
      const [a, b] = await place.connectAll(2)
      /** @extends {Promise<unknown>} */
      class Own extends Promise {}
      const value = { any: 'object' }
      const thenables = [
        () => ({ then: (resolve) => setTimeout(resolve, 10, value) }),
        () => ({ then: (resolve) => resolve(value) }),
        () => ({ then: (resolve) => resolve({ then: (inner) => inner(value) }) }),
        () => ({
          then(resolve, reject) {
            resolve(value)
            resolve('again')
            reject(new Error('again'))
            throw new Error('again')
          },
        }),
        () => Object.assign(() => {}, { then: (resolve) => resolve(value) }),
        () => Own.resolve(value),
        () => runInNewContext('(value) => Promise.resolve(value)')(value),
      ]
      for (const make of thenables) {
        let isHeld
        const given = await run(a, (lock) => {
          isHeld = () => lock.isHeld
          return make()
        })
        assert.equal(given, value)
        assert.equal(isHeld(), false)
      }
      await assertFree(b, 'fn')
    })

    test(`${way}: rejects with what fn throws, and releases`, async (place) => {
      const [a, b] = await place.connectAll(2)
      const own = new TypeError('mine')
      const reasons = [undefined, null, false, 0, NaN, '', 'text', 10n, Symbol('s'), {}, () => {}, own]
      for (const reason of reasons) {
        const fail = () => {
          throw reason
        }
        const rejected = [
          fail,
          async () => fail(),
          () => Promise.reject(reason),
          () => ({ then: (_, reject) => reject(reason) }),
          () => ({ then: fail }),
          () => Object.defineProperty({}, 'then', { get: fail }),
        ]
        for (const fn of rejected) assert.ok(Object.is(await rejection(run(a, fn)), reason), `${String(reason)} ${fn}`)
      }
      await assertFree(b, 'fn')
      assert.equal(a.stats().held, 0)
    })

    test(`${way}: holds the lock until the promise of fn is settled`, async (place) => {
      const [a, b] = await place.connectAll(2)
      let finish
      const call = run(a, () => new Promise((resolve) => (finish = resolve)))
      await until('fn runs', () => finish)
      await sleep(50)
      assert.equal(await b.tryAcquire('fn'), null)
      finish('done')
      assert.equal(await call, 'done')
      await assertFree(b, 'fn')
    })

    test(`${way}: calls fn once, without a receiver, with the lock alone`, async (place) => {
      const a = await place.connect()
      let calls = 0
      await run(
        a,
        /** @this {unknown} */ function (...args) {
          calls++
          assert.equal(this, undefined)
          assert.equal(args.length, 1)
          assert.equal(args[0].name, 'fn')
        },
      )
      assert.equal(calls, 1)
    })

    test(`${way}: fn sees the caller’s AsyncLocalStorage`, async (place) => {
      const a = await place.connect()
      const storage = new AsyncLocalStorage()
      const seen = await Promise.all(
        ['one', 'two', 'three'].map((id) =>
          storage.run(id, () => run(a, () => storage.getStore()).then((inside) => [id, inside, storage.getStore()])),
        ),
      )
      // The gist's function makes one attempt: of three concurrent calls some find the name busy, and do not call fn.
      const ran = seen.filter(([, inside]) => way === 'using' || inside !== undefined)
      assert.ok(ran.length > 0, JSON.stringify(seen))
      for (const [id, inside, after] of ran) assert.deepEqual([inside, after], [id, id])
    })
  }

  test('onEvent, credentials and the listeners of a signal see the AsyncLocalStorage of their registration', async () => {
    const printed = await output(`
      import { AsyncLocalStorage } from 'node:async_hooks'
      import { LockService } from '${INDEX}'
      const storage = new AsyncLocalStorage()
      const see = (what) => console.log(what, storage.getStore())
      const connect = (context, url, options) => storage.run(context, () => LockService.connect(url, options))
      await connect('first', 'memory:')
      const locks = await connect('second', 'memory:', { onEvent: ({ type }) => see(type) })
      await storage.run('job', async () => {
        const { signal } = await locks.acquire('n')
        signal.addEventListener('abort', () => see('abort'))
      })
      await locks.close()
      const login = () => {
        see('credentials')
        throw new Error('no login')
      }
      const options = { credentials: login, storeTimeoutMs: 2000 }
      await connect('third', 'redis://127.0.0.1:1', options).catch(() => {})
      const lazy = await connect('fourth', 'redis://127.0.0.1:1', { ...options, lazy: true })
      await storage.run('call', () => lazy.ping().catch(() => {}))`)
    const lines = ['acquired second', 'abort job', 'released second', 'credentials third', 'credentials fourth']
    assert.deepEqual(printed.split('\n').sort(), lines.sort())
  })

  test('the result of list is awaited or iterated', async (place) => {
    const locks = await place.connect()
    const lock = await locks.acquire('n')
    const both = locks.list()
    for await (const { name } of both) assert.equal(name, 'n')
    await rejects(both, 'LOCK_INVALID_ARGUMENT')
    const names = []
    const listed = locks.list()
    await sleep(20)
    for await (const { name } of listed) names.push(name)
    for (const { name } of await listed) names.push(name)
    assert.deepEqual(names, ['n', 'n'])
    assert.equal(await locks.list().then(([{ name }]) => name), 'n')
    await lock.release()
  })

  test('many callbacks at once', async (place) => {
    const a = await place.connect()
    const names = Array.from({ length: 500 }, (_, i) => `n:${i}`)
    const jobs = names.map((name, i) => a.using(name, (lock) => (i % 2 ? lock.name : sleep(1, lock.name))))
    const given = await Promise.all(jobs)
    assert.deepEqual(given, names)
    assert.deepEqual(a.stats().held, 0)
  })

  test('await using, written by hand', async (place) => {
    const [a, b] = await place.connectAll(2)
    const lock = await a.acquire('block')
    assert.equal(typeof lock[Symbol.asyncDispose], 'function')
    assert.equal(Object.hasOwn(lock, Symbol.asyncDispose), false)
    const thrown = new Error('from the block')
    const block = async () => {
      try {
        throw thrown
      } finally {
        await lock[Symbol.asyncDispose]()
      }
    }
    assert.equal(await rejection(block()), thrown)
    await assertFree(b, 'block')
  })
}
