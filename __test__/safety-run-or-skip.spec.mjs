// tryUsing: whether the job ran is distinguishable. acquireAndExecute: it has every option of using.
import assert from 'node:assert/strict'
import { hostname } from 'node:os'
import { LockError } from '../index.js'
import { assertFree, rejection, rejects, sleep, until, waiting } from './tools.mjs'
import { suite } from './stores.mjs'

const never = () => assert.fail('fn was called')

for (const kind of ['memory', 'redis', 'redis-quorum', 'mongodb', 'mongodb-replica-set']) {
  suite(kind, 'run or skip', (test) => {
    test('tryUsing runs the job, or returns the holder', async (store) => {
      const [a, b] = await store.connectAll(2)
      assert.deepEqual(await a.tryUsing('free', () => {}), { ran: true, value: undefined })
      assert.deepEqual(await a.tryUsing(['free', 'more'], { ttlMs: '5s' }, async (lock) => lock.names), {
        ran: true,
        value: ['free', 'more'],
      })
      const lock = await b.acquire('busy')
      for (const given of [[never], [{ waitMs: 20 }, never], [undefined, never]]) {
        // A store of a busy machine may not answer in time.
        const { ran, holder, ...rest } = await until('a holder', async () => {
          const attempt = await a.tryUsing('busy', ...given)
          return attempt.holder === null ? undefined : attempt
        })
        assert.deepEqual([ran, holder.host, holder.pid, rest], [false, hostname(), process.pid, {}])
        assert.deepEqual(holder.since, (await b.inspect('busy')).holder.since)
      }
      const waits = a.tryUsing('busy', { waitMs: 60_000 }, () => 'waited')
      await waiting(a, 1)
      await lock.release()
      assert.deepEqual(await waits, { ran: true, value: 'waited' })
      await assertFree(b, 'busy')
    })

    test('tryUsing rejects as using does', async (store) => {
      const [a, b] = await store.connectAll(2)
      const thrown = new Error('from fn')
      assert.equal(await rejection(a.tryUsing('n', () => Promise.reject(thrown))), thrown)
      // A `LOCK_TIMEOUT` of the job is not a skipped job.
      const busy = new LockError('LOCK_TIMEOUT', 'inside')
      assert.equal(
        await rejection(
          a.tryUsing('n', () => {
            throw busy
          }),
        ),
        busy,
      )
      assert.equal(await rejection(a.tryUsing('n', { signal: AbortSignal.abort(busy) }, never)), busy)
      const lost = a.tryUsing('n', { ttlMs: 1500 }, async (lock) => {
        await b.forceRelease('n')
        await until('the loss', () => lock.signal.aborted)
      })
      await rejects(lost, 'LOCK_LOST', { key: 'n' })
      await assertFree(b, 'n')
    })

    test('acquireAndExecute has the options of using', async (store) => {
      const [a, b] = await store.connectAll(2)
      const options = { name: 'gist', ttlMs: '5s', maxHoldMs: '1h', stallLimitMs: '1m', metadata: { why: 'test' } }
      await a.acquireAndExecute(options, async (lock) => {
        const { ttlMs, renew, metadata } = lock.transferable()
        assert.deepEqual({ ttlMs, renew, metadata }, { ttlMs: 5000, renew: false, metadata: { why: 'test' } })
        assert.deepEqual((await b.inspect('gist')).metadata, { why: 'test' })
        assert.equal(await b.acquireAndExecute({ name: 'gist' }, never), undefined)
      })
      const limited = await a.acquireAndExecute({ name: 'gist', renew: true, maxHoldMs: 1500 }, async (lock) => {
        await sleep(1600)
        return lock.isHeld
      })
      assert.equal(limited, false)
      const both = { name: 'gist', ttlMs: 5000, ttlSeconds: 5 }
      const { message } = await rejects(a.acquireAndExecute(both, never), 'LOCK_INVALID_ARGUMENT')
      assert.match(message, /^ttlSeconds must be absent when ttlMs/)
    })
  })
}
