// Runs the permissions on the pages of the stores: a server with authentication, the page's user, and every verb as this user.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import vm from 'node:vm'
import { LockService } from '../../index.js'
import { etcdctl, locateEtcd, startEtcd } from '../../scripts/etcd.mjs'
import { locateMariadb, startMariadb } from '../../scripts/mysql.mjs'
import { locatePostgres, startPostgres } from '../../scripts/postgres.mjs'
import { locateMongod, locateRedis, startRedis } from '../../scripts/servers.mjs'
import { locateZookeeper, startZookeeper } from '../../scripts/zookeeper.mjs'
import { blocksOf, oneLine, read } from './blocks.mjs'
import { MongodFixture } from '../mongodb/fixture.mjs'
import { withMysql } from '../mysql-client.mjs'
import { withPostgres } from '../postgres-client.mjs'
import { openRedis } from '../redis-client.mjs'
import { canStartServer } from '../stores.mjs'
import { SOON_MS, until } from '../tools.mjs'

/** Makes every call that a service can make to its store. */
export async function useEveryVerb(url) {
  const [one, two] = await Promise.all([LockService.connect(url), LockService.connect(url)])
  try {
    const lock = await one.acquire(['a', 'b'], { metadata: { why: 'test' } })
    await lock.extend(40_000)
    assert.equal(await two.tryAcquire('b'), null)
    assert.deepEqual((await two.inspect('a'))?.metadata, { why: 'test' })
    assert.deepEqual(
      (await two.list()).map(({ name }) => name),
      ['a', 'b'],
    )
    const waiter = two.acquire('a', { waitMs: 60_000 })
    // With too few rights it rejects before it is awaited.
    waiter.catch(() => {})
    await until('the other service waits', () => two.stats().waiting === 1)
    const start = performance.now()
    assert.equal(await (await one.restore(JSON.stringify(lock.transferable()))).release(), true)
    const next = await waiter
    assert.ok(performance.now() - start < SOON_MS, 'by a wake-up or by polling')
    assert.equal(await one.forceRelease('a'), true)
    assert.equal(await next.release(), false)
    const kept = await one.acquire('c', { minHoldMs: 2000 })
    assert.equal(await kept.release(), true)
    assert.equal(await two.acquireLock('c', 1), false)
    assert.equal(await two.acquireAndExecute({ name: 'c', waitMs: 10_000 }, () => 'ran'), 'ran')
  } finally {
    await Promise.all([one.close(), two.close()])
  }
}

export async function runRedis(code, t) {
  const [, inSource] = read('src/engine/redis/mod.rs').match(/^\/\/! ```text\n([\s\S]*?)^\/\/! ```/m) ?? ['', '']
  assert.equal(oneLine(code), oneLine(inSource.replace(/^\/\/! ?/gm, '')), 'the rule in src/engine/redis/mod.rs')
  if (!(await canStartServer(t, 'redis', locateRedis))) return
  const server = await startRedis()
  const clients = []
  const open = (options) => {
    clients.push(openRedis({ port: server.port, enableReadyCheck: false, ...options }))
    return clients.at(-1)
  }
  try {
    const password = randomBytes(8).toString('hex')
    assert.equal(await open().call(...oneLine(code).replace('PASSWORD', password).split(' ')), 'OK')
    for (const database of ['', '/3']) {
      await useEveryVerb(`redis://holdfast:${password}@127.0.0.1:${server.port}${database}`)
    }
    await assert.rejects(
      open({ username: 'holdfast', password }).get('another-key'),
      /NOPERM/,
      'only the needed rights',
    )
  } finally {
    for (const client of clients) client.disconnect()
    await server.stop()
  }
}

/** Lists the commands of a block for mongosh. */
function commandsOf(code) {
  const commands = []
  const db = {
    createRole: ({ role, ...more }) => commands.push({ createRole: role, ...more }),
    createUser: ({ user, ...more }) => commands.push({ createUser: user, ...more }),
  }
  vm.runInNewContext(code, { db })
  // Objects of another context have other prototypes.
  return JSON.parse(JSON.stringify(commands))
}

/** Returns the role on MongoDB's page: its name, and its privileges on the collection. */
export function documentedRights() {
  const [{ code }] = blocksOf('docs/stores/mongodb.md').filter(({ language }) => language === 'mongosh')
  const [{ createRole: role, privileges }] = commandsOf(code)
  assert.equal(privileges.length, 1)
  return { role, privileges }
}

export async function runMongosh(code, t) {
  if (!(await canStartServer(t, 'mongodb-replica-set', locateMongod))) return
  const fixture = new MongodFixture()
  try {
    const server = await fixture.startWithAuth({ replicaSet: true })
    const shop = server.admin.db('shop')
    const commands = commandsOf(code)
    assert.equal(commands.length, 2)
    for (const command of commands) await shop.command(command)

    await useEveryVerb(`mongodb://holdfast:PASSWORD@127.0.0.1:${server.port}/shop?replicaSet=rs0`)
    const user = (await fixture.client(server, 'holdfast:PASSWORD@', '&authSource=shop')).db('shop')
    const stream = user.collection('locks').watch()
    await Promise.race([stream.tryNext(), new Promise((resolve) => setTimeout(resolve, 500).unref())])
    await stream.close()
    await assert.rejects(user.collection('orders').insertOne({}), /not authorized/, 'only the needed rights')
    const indexes = await shop.collection('locks').indexes()
    assert.ok(indexes.some(({ key, expireAfterSeconds }) => key.expiresAt === 1 && expireAfterSeconds === 0))
  } finally {
    await fixture.close()
  }
}

export async function runPsql(code, t) {
  if (!(await canStartServer(t, 'postgres', locatePostgres))) return
  const server = await startPostgres()
  try {
    const owner = await LockService.connect(server.url)
    await owner.close()
    await withPostgres(server.url, (client) => client.query(code))
    const url = `postgres://app:PASSWORD@127.0.0.1:${server.port}/postgres`
    await useEveryVerb(url)
    await withPostgres(url, (client) =>
      assert.rejects(client.query('CREATE TABLE other ()'), /permission denied/, 'only the needed rights'),
    )
  } finally {
    await server.stop()
  }
}

export async function runMysql(code, t) {
  if (!(await canStartServer(t, 'mysql', locateMariadb))) return
  const server = await startMariadb()
  try {
    const owner = await LockService.connect(server.url)
    await owner.close()
    await withMysql(server.url, (client) => client.query(code))
    const url = `mysql://app:PASSWORD@127.0.0.1:${server.port}/holdfast`
    await useEveryVerb(url)
    await withMysql(url, (client) =>
      assert.rejects(client.query('CREATE TABLE other (a int)'), /denied/, 'only the needed rights'),
    )
  } finally {
    await server.stop()
  }
}

export async function runZookeeper(code, t) {
  if (!(await canStartServer(t, 'zookeeper', locateZookeeper))) return
  const server = await startZookeeper()
  try {
    const address = `127.0.0.1:${server.port}`
    execFileSync(await locateZookeeper(), ['--cli', '-server', address], {
      input: code,
      stdio: ['pipe', 'ignore', 'ignore'],
    })
    await useEveryVerb(`zookeeper://app:PASSWORD@${address}/locks`)
    for (const login of ['', 'app:other@', 'other:PASSWORD@']) {
      const locks = await LockService.connect(`zookeeper://${login}${address}/locks`)
      await assert.rejects(locks.tryAcquire('a'), { code: 'LOCK_STORE', retryable: false, message: /NoAuth \(-102\)/ })
      await locks.close()
    }
  } finally {
    await server.stop()
  }
}

export async function runEtcdctl(code, t) {
  if (!(await canStartServer(t, 'etcd', locateEtcd))) return
  const server = await startEtcd({ args: ['--bcrypt-cost', '4'] })
  try {
    for (const line of ['user add root:root', 'user grant-role root root', ...code.trim().split('\n'), 'auth enable'])
      await etcdctl(server, ...line.split(' '))
    await useEveryVerb(server.url.replace('//', '//app:PASSWORD@'))
    await assert.rejects(etcdctl(server, '--user=app:PASSWORD', 'put', 'other', ''), /denied/, 'only the needed rights')
  } finally {
    await server.stop()
  }
}
