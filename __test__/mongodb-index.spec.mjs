// The TTL index, which gist instances need to acquire the names of crashed holders; and indexes and validators that conflict.
import assert from 'node:assert/strict'
import { withDatabase } from './database.mjs'
import { suite } from './stores.mjs'
import { rejects } from './tools.mjs'

const WANTED = /"locks" has an index that conflicts with the TTL index \{ expiresAt: 1 \} with expireAfterSeconds: 0: /
const NAME = 'expiresAt_1'

/**
 * Conflicting indexes, as the arguments of `createIndex`, and the server's error code for each.
 *
 * @type {Record<string, [Record<string, 1>, import('mongodb').CreateIndexesOptions, RegExp]>}
 */
const CONFLICTS = {
  'on another field, of that name': [{ until: 1 }, { name: NAME }, /code 86/],
  'with another expireAfterSeconds': [{ expiresAt: 1 }, { expireAfterSeconds: 3600 }, /code 85/],
  'with another expireAfterSeconds, under another name': [
    { expiresAt: 1 },
    { name: 'mine', expireAfterSeconds: 60 },
    /code 85/,
  ],
  'without expireAfterSeconds': [{ expiresAt: 1 }, {}, /code 85/],
}

for (const kind of ['mongodb', 'mongodb-replica-set']) {
  suite(kind, 'the TTL index', (test) => {
    const on = (title, body) => test(title, withDatabase(kind, body))
    const keysOf = async (collection) =>
      (await collection.indexes()).filter(({ name }) => name !== '_id_').map(({ name, key }) => [name, key])

    on('is created when missing', async ({ store, collection }) => {
      await store.connect()
      assert.deepEqual(await keysOf(collection), [[NAME, { expiresAt: 1 }]])
    })

    for (const name of [NAME, 'mine']) {
      on(`is accepted when it exists as ${name}`, async ({ store, collection }) => {
        await collection.createIndex({ expiresAt: 1 }, { name, expireAfterSeconds: 0 })
        const locks = await store.connect()
        assert.equal(await locks.acquireLock('n', 60), true)
        assert.equal(await locks.releaseLock('n'), true)
        assert.deepEqual(await keysOf(collection), [[name, { expiresAt: 1 }]])
      })
    }

    for (const [which, [key, options, code]] of Object.entries(CONFLICTS)) {
      on(`an index ${which} makes connect reject with an error that names it`, async ({ store, collection }) => {
        const name = await collection.createIndex(key, options)
        const error = await rejects(store.connect(), 'LOCK_STORE', { engine: 'mongodb', retryable: false })
        for (const part of [WANTED, code, new RegExp(name)]) assert.match(error.message, part)
        assert.deepEqual(await keysOf(collection), [[name, key]], 'nothing was changed')
        await collection.dropIndex(name)
        const locks = await store.connect()
        assert.equal(await locks.acquireLock('n', 60), true)
        assert.equal(await locks.releaseLock('n'), true)
      })
    }

    on('another unique index makes acquire reject with an error that names it', async ({ store, collection }) => {
      await collection.createIndex({ name: 1 }, { unique: true })
      const locks = await store.connect()
      assert.equal(await locks.acquireLock('one', 60), true)
      for (const wants of [
        () => locks.acquireLock('two', 60),
        () => locks.acquire('two'),
        () => locks.tryAcquire(['two', 'three']),
      ]) {
        const error = await rejects(wants(), 'LOCK_STORE', { engine: 'mongodb', retryable: false })
        assert.match(error.message, /a unique index of another program conflicts: .* index: name_1 dup key/)
      }
      assert.equal(await locks.acquireLock('one', 60), false)
      assert.equal(await locks.releaseLock('one'), true)
      assert.equal(await locks.acquireLock('two', 60), true)
      assert.equal(await locks.releaseLock('two'), true)
    })

    on('a validator that forbids our fields makes acquire reject with code 121', async ({ store, collection }) => {
      await store.connect()
      const properties = { _id: {}, expiresAt: { bsonType: 'date' } }
      const validator = { $jsonSchema: { bsonType: 'object', additionalProperties: false, properties } }
      await collection.client.db(collection.dbName).command({ collMod: collection.collectionName, validator })
      const locks = await store.connect()
      const error = await rejects(locks.acquireLock('n', 60), 'LOCK_STORE', { engine: 'mongodb', retryable: false })
      assert.match(error.message, /Document failed validation \(code 121\)/)
    })
  })
}
