import assert from 'node:assert/strict'
import { chdir, cwd } from 'node:process'
import { existsSync, readdirSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { LockService } from '../index.js'
import { contract } from './contract.mjs'
import { suite } from './stores.mjs'
import { rejects } from './tools.mjs'

contract('sqlite')

suite('sqlite', 'the file', (test) => {
  test('the same name in two tables is two locks', async (store) => {
    const [a, b] = [await store.connect({ table: 'one' }), await store.connect({ table: 'two' })]
    const c = await store.connect({ table: 'one' })
    const lock = await a.acquire('same')
    assert.equal(await c.tryAcquire('same'), null)
    assert.deepEqual(await b.list(), [])
    const other = await b.acquire('same', { waitMs: 0 })
    assert.deepEqual([await lock.release(), await other.release()], [true, true])
  })

  test('missing folders are created, and a path may contain spaces, umlauts, ? and %', async (store) => {
    const path = join(dirname(store.target.slice('sqlite:'.length)), 'a new folder', 'ä?%', 'löcks.sqlite')
    const urls = [`sqlite:${path.replace('?%', '%3F%25')}`, `sqlite://${encodeURI(path).replace('?%25', '%3F%25')}`]
    const [a, b] = await Promise.all(urls.map((url) => LockService.connect(url)))
    const lock = await a.acquire('x')
    assert.ok(existsSync(path), readdirSync(dirname(path)).join())
    assert.equal(await b.tryAcquire('x'), null)
    await Promise.all([a.close(), b.close()])
    assert.equal(lock.isHeld, false)
  })

  test('a relative path is resolved against the working directory at the call', async (store) => {
    const before = cwd()
    chdir(dirname(store.target.slice('sqlite:'.length)))
    const call = LockService.connect('sqlite:locks.sqlite')
    chdir(before)
    const [a, b] = [await call, await store.connect()]
    const lock = await a.acquire('x')
    assert.equal(await b.tryAcquire('x'), null)
    assert.equal(await lock.release(), true)
    await a.close()
  })

  test('connect to a file that is not a database rejects with LOCK_STORE', async () => {
    const url = new URL(import.meta.url)
    const call = LockService.connect(`sqlite:${url.pathname}`)
    const error = await rejects(call, 'LOCK_STORE', { engine: 'sqlite', retryable: false })
    assert.ok(error.cause instanceof Error)
  })
})
