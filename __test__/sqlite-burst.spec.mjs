// Many calls at once on SQLite, dead waiters, and database files that are deleted or read while a service is open.
import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync, rmSync } from 'node:fs'
import { test } from 'node:test'
import { burst } from './soak/sqlite.mjs'
import { withStore } from './stores.mjs'
import { INDEX, output, SOON_MS, waiting } from './tools.mjs'

const TIMEOUT_MS = 90_000
const inSqlite = (body) => () => withStore('sqlite', body)

/** Whether a separate process is granted a name. It closes its service at the end. */
async function grantedElsewhere(target, name) {
  const code = `
    import { LockService } from ${JSON.stringify(INDEX)}
    const locks = await LockService.connect(${JSON.stringify(target)})
    const lock = await locks.tryAcquire(${JSON.stringify(name)}, { ttlMs: 60_000 })
    process.stdout.write(String(lock !== null))
    await locks.close()`
  return (await output(code)) === 'true'
}

test('every call of a burst is granted or rejects in time, and leaves no lock', { timeout: TIMEOUT_MS }, async () => {
  await burst(20_000)
})

test(
  'calls of one tick are served in the order of the calls',
  { timeout: TIMEOUT_MS },
  inSqlite(async (store) => {
    for (let round = 0; round < 5; round++) {
      const locks = await store.connect()
      const order = []
      const calls = Array.from({ length: 50 }, async (_, i) => {
        const lock = await locks.acquire('n', { waitMs: 30_000 })
        order.push(i)
        await lock.release()
      })
      await Promise.all(calls)
      assert.deepEqual(
        order,
        Array.from({ length: 50 }, (_, i) => i),
      )
    }
  }),
)

test(
  'a dead waiter blocks the next waiter for no longer than its ttl',
  { timeout: TIMEOUT_MS },
  inSqlite(async (store) => {
    const [holder, next] = await store.connectAll(2)
    const lock = await holder.acquire('n')
    const code = `
    import { LockService } from ${JSON.stringify(INDEX)}
    const locks = await LockService.connect(${JSON.stringify(store.target)})
    locks.acquire('n', { ttlMs: 400, waitMs: 60_000 })
    while (locks.stats().waiting < 1) await new Promise((resolve) => setTimeout(resolve, 5))
    process.stdout.write('waiting')`
    const child = spawn(process.execPath, ['--input-type=module', '-e', code], { stdio: ['ignore', 'pipe', 'inherit'] })
    await once(child.stdout, 'data')
    const call = next.acquire('n', { waitMs: 30_000 })
    await waiting(next, 1)
    child.kill('SIGKILL')
    await once(child, 'exit')
    await lock.release()
    const startedAt = performance.now()
    const granted = await call
    const took = performance.now() - startedAt
    assert.ok(took < SOON_MS, `${Math.round(took)} ms`)
    await granted.release()
  }),
)

test(
  'deleting the files, or reading them in the same process, causes no second holder',
  { timeout: TIMEOUT_MS },
  inSqlite(async (store) => {
    const locks = await store.connect()
    const file = store.target.slice('sqlite:'.length)
    const files = ['', '-wal', '-shm'].map((suffix) => file + suffix)
    const interferences = {
      deleted: () => files.slice(1).forEach((name) => rmSync(name, { force: true })),
      read: () => files.forEach((name) => readFileSync(name)),
    }
    for (const [how, interfere] of Object.entries(interferences)) {
      const before = await locks.acquire(`before ${how}`)
      interfere()
      await grantedElsewhere(store.target, `elsewhere ${how}`)
      const after = await locks.acquire(`after ${how}`)
      assert.equal(await grantedElsewhere(store.target, `after ${how}`), false, `${how}: two holders`)
      assert.equal(await after.release(), true)
      await before.release()
    }
  }),
)
