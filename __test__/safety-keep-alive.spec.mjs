// A process does not exit by itself while a job runs, and exits as before with leases alone.
import assert from 'node:assert/strict'
import { INDEX, runNode } from './tools.mjs'
import { suite } from './stores.mjs'

for (const kind of ['memory', 'redis', 'mongodb']) {
  suite(kind, 'a process with jobs', { concurrency: 2 }, (test) => {
    /** Runs `body` with the services `a` and `b` in a process with nothing else to do. */
    const run = async (store, body) => {
      const code = `
        import { LockService } from '${INDEX}'
        const connect = () => LockService.connect(...${JSON.stringify([store.target, store.options])})
        const [a, b] = [await connect(), await connect()]
        const lost = ({ signal }) => new Promise((resolve) => signal.addEventListener('abort', () => resolve(signal.reason.code)))
        ${body}`
      const { stdout, code: status } = await runNode(code)
      return [...stdout.split('\n').filter(Boolean), `exit ${status}`]
    }

    for (const [what, call] of [
      ['using', `a.using('n', { ttlMs: 1500, maxHoldMs: 2000 }, job)`],
      ['tryUsing', `a.tryUsing('n', { ttlMs: 1500, maxHoldMs: 2000 }, job)`],
      ['acquireAndExecute', `a.acquireAndExecute({ name: 'n', ttlSeconds: 1.5 }, job)`],
    ]) {
      test(`it waits for a job of ${what} that waits for its signal alone`, async (store) => {
        const lines = await run(
          store,
          `const job = async (lock) => console.log(await lost(lock))
          await Promise.all([${call}, b.using('m', () => {})]).catch((error) => console.log('rejects', error.code))
          console.log('ended')`,
        )
        const rejection = what === 'acquireAndExecute' ? [] : ['rejects LOCK_LOST']
        assert.deepEqual(lines, ['LOCK_LOST', ...rejection, 'ended', 'exit 0'])
      })
    }

    test('it exits when the last of several jobs has ended, whatever the jobs throw', async (store) => {
      const lines = await run(
        store,
        `const jobs = ['1', '2', '3'].map((name) => a.using(name, async () => { await null; if (name !== '2') throw name }))
        console.log((await Promise.allSettled(jobs)).map(({ status }) => status).join())
        await a.acquireAndExecute('n', () => { throw 1 }).catch(() => {})
        await a.acquire('held', { ttlMs: 60_000 })`,
      )
      assert.deepEqual(lines, ['rejected,fulfilled,rejected', 'exit 0'])
      store.mayLeaveLocks = true
    })

    test('it does not wait for leases', async (store) => {
      const lines = await run(
        store,
        `const lock = await a.acquire('held', { ttlMs: 60_000 })
        await a.using('n', () => {})
        await lost(lock)`,
      )
      // 13: a promise at the top level has not settled.
      assert.deepEqual(lines, ['exit 13'])
      store.mayLeaveLocks = true
    })
  })
}
