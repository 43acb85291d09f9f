import assert from 'node:assert/strict'
import { contract } from './contract.mjs'
import { suite } from './stores.mjs'

contract('mongodb')

suite('mongodb', 'collections', (test) => {
  test('the same name in two collections is two locks', async (store) => {
    const other = `${store.options.collection}_other`
    const [a, b] = [await store.connect(), await store.connect({ collection: other })]
    const lock = await a.acquire('same')
    assert.deepEqual(await b.list(), [])
    const second = await b.acquire('same', { waitMs: 0 })
    assert.deepEqual([await lock.release(), await second.release()], [true, true])
    store.dropAtEnd(other)
  })
})
