// onEvent: what it throws becomes a warning, and has no other effect.
import assert from 'node:assert/strict'
import { assertFree, INDEX, output, until } from '../tools.mjs'

/** Collects the warnings that mention `mark` while `body` runs. */
async function warnings(mark, body) {
  const seen = []
  const collect = (warning) => String(warning.message).includes(mark) && seen.push(warning)
  process.on('warning', collect)
  try {
    await body(seen)
  } finally {
    process.off('warning', collect)
  }
}

export function events(test) {
  const failures = {
    'throws an error': () => {
      throw new Error('mark-throws')
    },
    'throws text': () => {
      throw 'mark-throws'
    },
    'returns a promise that rejects': () => Promise.reject(new Error('mark-throws')),
    'is an async function that throws': async () => {
      throw new Error('mark-throws')
    },
    'returns something with a then that throws': () => ({
      then() {
        throw new Error('mark-throws')
      },
    }),
    'returns something whose then cannot be read': () => ({
      get then() {
        throw new Error('mark-throws')
      },
    }),
  }
  for (const [what, onEvent] of Object.entries(failures)) {
    test(`an onEvent that ${what} emits a warning and has no other effect`, async (place) => {
      const [a, b] = [await place.connect({ onEvent }), await place.connect()]
      const rejections = []
      const collect = (reason) => String(reason?.message).includes('mark-throws') && rejections.push(reason)
      process.on('unhandledRejection', collect)
      await warnings('mark-throws', async (seen) => {
        const lock = await a.acquire('watched')
        assert.equal(await b.tryAcquire('watched'), null)
        assert.equal(await lock.release(), true)
        await assertFree(b, 'watched')
        await until('two warnings', () => seen.length >= 2)
        for (const warning of seen) {
          assert.ok(warning instanceof Error)
          assert.equal(warning.name, 'HoldfastWarning')
          assert.match(warning.message, /onEvent/)
        }
      })
      process.off('unhandledRejection', collect)
      assert.deepEqual(rejections, [])
    })
  }

  test('an onEvent that throws a value without text emits a warning as well', async (place) => {
    const thrown = [undefined, null, Symbol('s'), Object.create(null)]
    const a = await place.connect({
      onEvent: () => {
        throw thrown.shift()
      },
    })
    await warnings('onEvent failed', async (seen) => {
      for (let i = 0; i < 2; i++) assert.equal(await (await a.acquire('odd')).release(), true)
      await until('four warnings', () => seen.length >= 4)
    })
  })

  test('onEvent may use the service', async (place) => {
    const answers = []
    const a = await place.connect({
      onEvent: async ({ type, name }) => {
        if (type === 'acquired' && name === 'first') answers.push(await a.acquireLock('second'))
      },
    })
    const lock = await a.acquire('first')
    await until('the answer', () => answers.length)
    assert.deepEqual(answers, [true])
    assert.equal(await lock.release(), true)
    assert.equal(await a.releaseLock('second'), true)
  })

  test('onEvent is called with one event, without a receiver', async (place) => {
    const calls = []
    const a = await place.connect({
      onEvent: function (...args) {
        calls.push([this, args.length, Object.isExtensible(args[0])])
      },
    })
    await a.using('x', () => {})
    await until('two events', () => calls.length === 2)
    assert.deepEqual(calls, [
      [undefined, 1, true],
      [undefined, 1, true],
    ])
  })

  test('an abort listener that throws is an uncaught exception, and does not stop holdfast', async () => {
    const seen = await output(`
      import { LockService } from '${INDEX}'
      process.on('uncaughtException', (error) => console.log(error.message))
      const [a, b] = [await LockService.connect('memory:'), await LockService.connect('memory:')]
      const lock = await a.acquire('lost', { ttlMs: 60, renew: false })
      lock.signal.addEventListener('abort', () => { throw new Error('from the listener') })
      const next = await b.acquire('lost', { waitMs: 20_000 })
      await new Promise((resolve) => setTimeout(resolve, 20))
      console.log(lock.isHeld, lock.signal.aborted, await next.release())
      await Promise.all([a.close(), b.close()])`)
    assert.equal(seen, 'from the listener\nfalse true true')
  })
}
