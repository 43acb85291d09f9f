// elect and watch: one leader, its end, and its successor.
import assert from 'node:assert/strict'
import { assertFree, assertGrowing, rejection, rejects, sleep, until, waiting } from '../tools.mjs'

/** Resolves when a signal aborts. */
const aborted = (signal) => new Promise((resolve) => signal.addEventListener('abort', resolve))

/** A candidate that records its leaderships, and asserts that it is the only leader of `terms`. */
function candidate(service, terms, options) {
  return service.elect('leader', { ttlMs: '10s', ...options }, async (leadership) => {
    const { signal, term } = leadership
    assert.ok(
      terms.every((other) => !other.isLeader),
      'two leaders',
    )
    assert.equal(leadership.name, 'leader')
    terms.push(leadership)
    assert.equal(leadership.isLeader, true)
    assert.ok(leadership.remainingMs > 0 && typeof term === 'bigint')
    await aborted(signal)
    assert.equal(leadership.isLeader, false)
  })
}

export function elect(test) {
  test('elect has one leader, and another one after resign() and stop()', async (store) => {
    const [a, b] = await store.connectAll(2)
    const terms = []
    const one = candidate(a, terms)
    await until('a leader', () => one.isLeader)
    const two = candidate(b, terms)
    await waiting(b, 1)
    assert.deepEqual([one.term, two.term, two.isLeader], [terms[0].term, null, false])
    await two.resign()
    if (store.ordered) {
      await one.resign()
      assert.equal(terms[0].signal.reason.name, 'AbortError')
      await until('the second leader', () => two.isLeader)
      await waiting(a, 1)
      await two.resign()
      await until('the first leader', () => one.isLeader)
      await waiting(b, 1)
    }
    await one.stop()
    assert.deepEqual([one.term, one.isLeader], [null, false])
    await one.done
    await until('the last leader', () => two.isLeader)
    assert.equal(terms.length, store.ordered ? 4 : 2)
    assertGrowing(terms.map(({ term }) => term))
    await two[Symbol.asyncDispose]()
    await assertFree(a, 'leader')
    await one.stop()
  })

  test('a leader that loses the lock leads again only after fn has settled', async (store) => {
    const [a, b] = await store.connectAll(2)
    let running = 0
    const terms = []
    const election = a.elect('leader', { ttlMs: 2500 }, async ({ signal, term }) => {
      assert.equal(++running, 1, 'two at once in a process')
      terms.push(term)
      await aborted(signal)
      if (terms.length === 1) assert.equal(signal.reason.code, 'LOCK_LOST')
      await sleep(300)
      running--
    })
    await until('a leader', () => election.isLeader)
    assert.equal(await b.forceRelease('leader'), true)
    await until('the loss', () => !election.isLeader)
    await until('a leader', () => election.isLeader)
    assert.equal(terms.length, 2)
    assertGrowing(terms)
    await election.stop()
  })

  test('an error of fn ends the election, or a candidate with restart continues', async (store) => {
    const [a, b] = await store.connectAll(2)
    const thrown = new Error('from fn')
    const fails = () => {
      throw thrown
    }
    assert.equal(await rejection(a.elect('leader', fails).done), thrown)
    await assertFree(b, 'leader')
    const errors = []
    const election = a.elect(
      'leader',
      { restart: true, onError: (error) => errors.push(error) },
      async ({ signal }) => {
        if (errors.length < 2) throw thrown
        await aborted(signal)
        throw signal.reason
      },
    )
    await until('a leader', () => election.isLeader && errors.length === 2)
    assert.deepEqual(errors, [thrown, thrown])
    await election.stop()
    await election.done
  })

  test('close({ drainMs }) and an abort end an election', async (store) => {
    const [a, b, c] = await store.connectAll(3)
    const terms = []
    const one = candidate(a, terms)
    await until('a leader', () => one.isLeader)
    const controller = new AbortController()
    const two = candidate(b, terms, { signal: controller.signal })
    const three = candidate(c, terms)
    await Promise.all([waiting(b, 1), waiting(c, 1)])
    controller.abort()
    await two.done
    assert.equal(b.stats().waiting, 0)
    await a.close({ drainMs: '60s' })
    assert.equal(terms[0].signal.reason.name, 'AbortError')
    await one.done
    await until('the successor', () => three.isLeader)
    await c.close()
    await three.done
    await b.elect('leader', { signal: controller.signal }, () => assert.fail('it was aborted')).done
    await rejects(a.elect('leader', () => {}).done, 'LOCK_CLOSED')
  })

  test('watch yields the changes of the holder', async (store) => {
    const [a, b] = await store.connectAll(2)
    const seen = []
    const controller = new AbortController()
    const reading = (async () => {
      // A read on MongoDB may find a lock before its token.
      for await (const info of b.watch('name', { intervalMs: 20, signal: controller.signal }))
        if (info?.fencingToken !== null) seen.push(info)
    })()
    const failed = rejection(reading)
    const other = b.watch('name', { intervalMs: '20ms' })
    await until('free', () => seen.length === 1)
    const lock = await a.acquire('name', { metadata: 'first' })
    await until('held', () => seen.length === 2)
    await lock.extend(60_000)
    await lock.release()
    await until('free again', () => seen.length === 3)
    const next = await a.acquire('name')
    await until('held again', () => seen.length === 4)
    assert.deepEqual(
      seen.map((info) => info && info.metadata),
      [null, 'first', null, null],
    )
    assert.deepEqual((await other.next()).value?.holder, seen[3].holder)
    const pending = other.next()
    await other.return()
    assert.deepEqual(await pending, { done: true, value: undefined })
    controller.abort('enough')
    assert.equal(await failed, 'enough')
    await next.release()
    const last = b.watch('name')
    assert.equal((await last.next()).value, null)
    const end = last.next()
    await b.close()
    assert.deepEqual(await end, { done: true, value: undefined })
  })
}
