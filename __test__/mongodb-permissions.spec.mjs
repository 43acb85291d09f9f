// The rights of a MongoDB user: exactly the role in docs/stores/mongodb.md.
import assert from 'node:assert/strict'
import { LockService } from '../index.js'
import { SECRET, urlOf, withMongod } from './mongodb/fixture.mjs'
import { startProxy } from './proxy.mjs'
import { documentedRights, useEveryVerb } from './readme/permissions.mjs'
import { rejects, until } from './tools.mjs'

const DEPLOYMENTS = [
  { kind: 'standalone', replicaSet: false },
  { kind: 'replica set', replicaSet: true },
]
const ROLE = documentedRights()
const ACTIONS = ROLE.privileges[0].actions
const TTL_INDEX = { key: { expiresAt: 1 }, name: 'expiresAt_1', expireAfterSeconds: 0 }

/**
 * Creates a user with these actions on the collection of the documented role, in a separate database. Returns its URL.
 *
 * @param {any} server
 * @param {string} database
 * @param {string[]} actions
 * @param {{ mechanism?: string, more?: string }} [options]
 */
async function userWith(server, database, actions, { mechanism, more = '' } = {}) {
  const db = server.admin.db(database)
  const resource = { ...ROLE.privileges[0].resource, db: database }
  const privileges = actions.length > 0 ? [{ resource, actions }] : []
  await db.command({ createRole: ROLE.role, privileges, roles: [] })
  const mechanisms = mechanism ? { mechanisms: [mechanism] } : {}
  await db.command({ createUser: 'app', pwd: `${SECRET}-app`, roles: [ROLE.role], ...mechanisms })
  return urlOf(server, { login: `app:${SECRET}-app`, path: database, options: more })
}

/** Lists the lines of the server's log about refused operations. */
async function refusals(server) {
  const { log } = await server.admin.db('admin').command({ getLog: 'global' })
  assert.ok(log.length < 1000, 'the server keeps 1024 lines')
  return log.filter((line) => /not authorized|Unauthorized|authorization failed/i.test(line))
}

for (const { kind, replicaSet } of DEPLOYMENTS) {
  withMongod(
    `${kind}: the documented role is sufficient with both SCRAM mechanisms, and nothing is refused`,
    async (fixture) => {
      const server = await fixture.startWithAuth({ replicaSet })
      // The set-up of the test causes refusals, too.
      const before = await refusals(server)
      for (const mechanism of ['SCRAM-SHA-1', 'SCRAM-SHA-256']) {
        for (const named of ['', `authMechanism=${mechanism}`]) {
          const database = `db_${mechanism.replaceAll('-', '_')}${named && '_named'}`
          await useEveryVerb(await userWith(server, database, ACTIONS, { mechanism, more: named }))
          const indexes = await server.admin.db(database).collection('locks').indexes()
          assert.ok(indexes.some(({ key, expireAfterSeconds }) => key.expiresAt === 1 && expireAfterSeconds === 0))
        }
      }
      assert.deepEqual(await refusals(server), before)

      // The log shows refusals.
      const user = await fixture.client(server, `app:${SECRET}-app@`, '&authSource=db_SCRAM_SHA_1')
      await assert.rejects(user.db('db_SCRAM_SHA_1').collection('orders').insertOne({}), /not authorized/)
      assert.equal((await refusals(server)).length, before.length + 1)
    },
  )

  withMongod(`${kind}: every action of the role is needed`, async (fixture) => {
    const server = await fixture.startWithAuth({ replicaSet })
    for (const action of ACTIONS) {
      const database = `without_${action}`
      const url = await userWith(
        server,
        database,
        ACTIONS.filter((other) => other !== action),
      )
      const error = await useEveryVerb(url).then(
        () => undefined,
        (thrown) => thrown,
      )
      if (action === 'changeStream' || action === 'createIndex') {
        assert.equal(error, undefined, action)
        const refused = (await refusals(server)).some((line) => line.includes(database))
        // holdfast opens no change stream on a standalone.
        assert.equal(refused, replicaSet || action === 'createIndex', action)
        continue
      }
      assert.equal(error?.code, 'LOCK_STORE', `${action}: ${error?.message}`)
      assert.equal(error.retryable, false)
      assert.match(error.message, /the user has not the right to do this: not authorized on \w+ to execute \w+/, action)
      assert.doesNotMatch(error.message, new RegExp(SECRET))
    }
  })

  withMongod(`${kind}: without createIndex the index must exist`, async (fixture) => {
    const server = await fixture.startWithAuth({ replicaSet })
    const actions = [...ACTIONS.filter((action) => action !== 'createIndex'), 'listIndexes']
    const url = await userWith(server, 'shop', actions)
    const locks = server.admin.db('shop').collection('locks')
    const error = await rejects(LockService.connect(url), 'LOCK_STORE', { retryable: false })
    assert.match(error.message, /has not the TTL index \{ expiresAt: 1 \} with expireAfterSeconds: 0/)
    await server.admin.db('shop').command({ createIndexes: 'locks', indexes: [TTL_INDEX] })
    await useEveryVerb(url)
    await locks.dropIndex(TTL_INDEX.name)
    await server.admin
      .db('shop')
      .command({ createIndexes: 'locks', indexes: [{ ...TTL_INDEX, expireAfterSeconds: 9 }] })
    await rejects(LockService.connect(url), 'LOCK_STORE', { retryable: false })
  })
}

withMongod('connect rejects for a user without any right', async (fixture) => {
  const server = await fixture.startWithAuth()
  const url = await userWith(server, 'shop', [])
  const error = await rejects(LockService.connect(url), 'LOCK_STORE', { retryable: false })
  assert.match(error.message, /the user has not the right to do this: not authorized on shop to execute findAndModify/)
  assert.doesNotMatch(error.message, new RegExp(SECRET))
})

/** A field of the reply to `hello`, and one of the same length that only a router has. */
const [CONNECTION_ID, OF_ROUTER] = ['\x10connectionId\0', '\x02msg\0\x09\0\0\0isdbgrid\0'].map((text) =>
  Buffer.from(text, 'latin1'),
)

withMongod('a router whose shard keys the user cannot read is reported', async (fixture) => {
  const server = await fixture.startWithAuth({ replicaSet: true })
  const proxy = await startProxy(server.port)
  fixture.onClose(() => proxy.close())
  let replies = 0
  proxy.changeReply = (reply) => {
    for (let at = reply.indexOf(CONNECTION_ID); at >= 0; at = reply.indexOf(CONNECTION_ID)) {
      OF_ROUTER.copy(reply, at)
      replies++
    }
  }
  const url = await userWith({ ...server, port: proxy.port }, 'shop', ACTIONS, { more: 'directConnection=true' })
  const warnings = /** @type {any[]} */ ([])
  const warn = (warning) => warnings.push(warning)
  process.on('warning', warn)
  fixture.onClose(() => process.off('warning', warn))
  const locks = await fixture.connect(url)
  assert.equal(await locks.using('n', (lock) => lock.isHeld), true)
  assert.ok(replies > 0)
  await until('a warning', () => warnings.length > 0)
  assert.deepEqual(
    warnings.map(({ name, code }) => [name, code]),
    [['HoldfastWarning', 'HOLDFAST_STORE']],
  )
  assert.match(
    warnings[0].message,
    /cannot check the shard key of the collection shop\.locks\..* Grant the user the action find/,
  )

  const resource = { db: 'config', collection: 'collections' }
  const privileges = [{ resource, actions: ['find'] }]
  await server.admin.db('admin').command({ createRole: 'router', privileges, roles: [] })
  await server.admin.db('shop').command({ grantRolesToUser: 'app', roles: [{ role: 'router', db: 'admin' }] })
  await useEveryVerb(url)
  const collections = server.admin.db('config').collection('collections')
  await collections.insertOne({ _id: /** @type {any} */ ('shop.locks'), key: { owner: 1 } })
  const error = await rejects(LockService.connect(url), 'LOCK_STORE', { retryable: false })
  assert.match(error.message, /is sharded by another key than _id/)
  assert.equal(warnings.length, 1)
})

withMongod('a running service reports a revoked right, and works again when it is granted', async (fixture) => {
  const server = await fixture.startWithAuth()
  const service = await fixture.connect(await userWith(server, 'shop', ACTIONS))
  const privileges = [{ resource: { ...ROLE.privileges[0].resource, db: 'shop' }, actions: ACTIONS }]
  await server.admin.db('shop').command({ revokePrivilegesFromRole: ROLE.role, privileges })
  const error = await rejects(service.tryAcquire('n'), 'LOCK_STORE', { retryable: false, key: 'n' })
  assert.match(error.message, /the user has not the right to do this/)
  await server.admin.db('shop').command({ grantPrivilegesToRole: ROLE.role, privileges })
  const lock = await until('the right is granted again', () => service.tryAcquire('n').catch(() => null))
  assert.equal(await lock.release(), true)
})
