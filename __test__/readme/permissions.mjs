// Runs the README's permissions: a server that asks who is there, the user from the README, and every verb in its name.
import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import net from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import vm from 'node:vm'
import { LockService } from '../../index.js'
import { locateMongod, locateRedis, startMongod, startRedis } from '../../scripts/servers.mjs'
import { blocksOf, read } from './blocks.mjs'
import { SOON_MS, until } from '../tools.mjs'

/** Whether a server can be started here; a visible skip where it cannot, and a failure in CI. */
async function has(locate, kind, t) {
  try {
    // Without this variable nobody asked for servers, and none is fetched for it.
    if (!process.env[`HOLDFAST_TEST_${kind}_URL`]) throw new Error(`HOLDFAST_TEST_${kind}_URL is not set`)
    await locate()
    return true
  } catch (error) {
    assert.ok(!process.env.CI, error.message)
    t.skip(`no ${kind.toLowerCase()}: ${error.message}`)
    return false
  }
}

/** Everything that a service does at its store. */
export async function useEveryVerb(url) {
  const [one, two] = await Promise.all([LockService.connect(url), LockService.connect(url)])
  try {
    const lock = await one.acquire(['a', 'b'], { metadata: { why: 'test' } })
    await lock.extend(40_000)
    assert.equal(await two.tryAcquire('b'), null)
    assert.deepEqual((await two.inspect('a')).metadata, { why: 'test' })
    assert.deepEqual((await two.list()).map(({ name }) => name), ['a', 'b'])
    const waiter = two.acquire('a', { waitMs: 60_000 })
    // Whoever tries this with too few rights fails before it is awaited.
    waiter.catch(() => {})
    await until('the other one waits', () => two.stats().waiting === 1)
    const start = performance.now()
    assert.equal(await (await one.restore(JSON.stringify(lock))).release(), true)
    const next = await waiter
    assert.ok(performance.now() - start < SOON_MS, 'woken, or at least polling')
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

/** The text of a fence as one line. */
const oneLine = (text) => text.trim().split(/\s+/).join(' ')

export async function runRedis(code, t) {
  const [, inSource] = read('src/engine/redis/mod.rs').match(/^\/\/! ```text\n([\s\S]*?)^\/\/! ```/m)
  assert.equal(oneLine(code), oneLine(inSource.replace(/^\/\/! ?/gm, '')), 'the same as in src/engine/redis/mod.rs')
  if (!(await has(locateRedis, 'REDIS', t))) return
  const server = await startRedis()
  try {
    const password = randomBytes(8).toString('hex')
    assert.equal(await redisSays(server.port, [oneLine(code).replace('PASSWORD', password)]), '+OK')
    for (const database of ['', '/3']) {
      await useEveryVerb(`redis://holdfast:${password}@127.0.0.1:${server.port}${database}`)
    }
    const denied = await redisSays(server.port, [`AUTH holdfast ${password}`, 'GET somebody-elses'])
    assert.match(denied, /^-NOPERM/, 'no more than it needs')
  } finally {
    await server.stop()
  }
}

/** Sends commands, and gives the answer to the last one. */
function redisSays(port, commands) {
  return new Promise((resolve, reject) => {
    let heard = ''
    const socket = net.connect(port, '127.0.0.1')
    socket.write(commands.map((command) => `${command}\r\n`).join(''))
    socket.once('error', reject).on('data', (data) => {
      heard += data
      const answers = heard.split('\r\n').slice(0, -1)
      if (answers.length < commands.length) return
      socket.destroy()
      resolve(answers.at(-1))
    })
  })
}

/** The commands of a block for mongosh, in their order. */
function commandsOf(code) {
  const commands = []
  const db = {
    createRole: ({ role, ...more }) => commands.push({ createRole: role, ...more }),
    createUser: ({ user, ...more }) => commands.push({ createUser: user, ...more }),
  }
  vm.runInNewContext(code, { db })
  // The objects of another context are not quite like those of this one.
  return JSON.parse(JSON.stringify(commands))
}

/** The role that the README gives to MongoDB's users: its name, and its privileges on the one collection. */
export function rightsInReadme() {
  const [{ code }] = blocksOf('README.md').filter(({ language }) => language === 'mongosh')
  const [{ createRole: role, privileges }] = commandsOf(code)
  assert.equal(privileges.length, 1)
  return { role, privileges }
}

export async function runMongosh(code, t) {
  if (!(await has(locateMongod, 'MONGODB_RS', t))) return
  const { MongoClient } = await import('mongodb')
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-test-'))
  const keyFile = join(folder, 'key')
  // Members of a set ask each other for a key, too.
  writeFileSync(keyFile, randomBytes(48).toString('base64'), { mode: 0o600 })
  const server = await startMongod({ replicaSet: true, args: ['--auth', '--keyFile', keyFile] })
  const clients = []
  const connect = async (credentials, rest) => {
    clients.push(await MongoClient.connect(`mongodb://${credentials}127.0.0.1:${server.port}/${rest}`))
    return clients.at(-1)
  }
  try {
    // The first user may be made by whoever is on the machine.
    const first = await connect('', 'admin?directConnection=true')
    await first.db('admin').command({ createUser: 'admin', pwd: 'x', roles: ['root'] })
    const shop = (await connect('admin:x@', '?authSource=admin&directConnection=true')).db('shop')

    const commands = commandsOf(code)
    assert.equal(commands.length, 2)
    for (const command of commands) await shop.command(command)

    await useEveryVerb(`mongodb://holdfast:PASSWORD@127.0.0.1:${server.port}/shop?replicaSet=rs0`)
    const user = (await connect('holdfast:PASSWORD@', 'shop?directConnection=true')).db('shop')
    const stream = user.collection('locks').watch()
    await Promise.race([stream.tryNext(), new Promise((resolve) => setTimeout(resolve, 500).unref())])
    await stream.close()
    await assert.rejects(user.collection('orders').insertOne({}), /not authorized/, 'no more than it needs')
    const indexes = await shop.collection('locks').indexes()
    assert.ok(indexes.some(({ key, expireAfterSeconds }) => key.expiresAt === 1 && expireAfterSeconds === 0))
  } finally {
    await Promise.all(clients.map((client) => client.close()))
    await server.stop()
    rmSync(folder, { recursive: true, force: true })
  }
}
