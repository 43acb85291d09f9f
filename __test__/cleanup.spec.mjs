// Clean-up after aborted calls, garbage collection and process exit: no lock is left without a holder.
import assert from 'node:assert/strict'
import { execFile, fork } from 'node:child_process'
import { once } from 'node:events'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { promisify } from 'node:util'
import { LockService } from '../index.js'
import { startRedis } from '../scripts/servers.mjs'
import { startProxy } from './proxy.mjs'
import { until } from './tools.mjs'

const run = promisify(execFile)
const index = new URL('../index.js', import.meta.url).href
let redis
let proxy

before(async () => {
  redis = await startRedis()
  proxy = await startProxy(redis.port)
})
after(async () => {
  await proxy.close()
  await redis.stop()
})

/** Runs a module in a separate process. */
const node = (source, ...flags) =>
  run(process.execPath, [...flags, '--input-type=module', '-e', source], { timeout: 60_000 })

test('a process whose call was aborted in flight releases the lock before it exits', async () => {
  const locks = await LockService.connect(redis.url)
  const child = fork(new URL('children/abort.mjs', import.meta.url), [`redis://127.0.0.1:${proxy.port}`])
  const exited = once(child, 'exit')
  await once(child, 'message')
  proxy.holdReplies()
  child.send('acquire')
  while ((await locks.inspect('aborted')) === null) await sleep(10)
  child.send('abort')
  await once(child, 'message')
  // The call has rejected and nothing else keeps the process alive, but the store has granted the lock.
  await sleep(300)
  assert.notEqual(await locks.inspect('aborted'), null)
  proxy.resume()
  assert.deepEqual(await exited, [0, null])
  assert.equal(await locks.inspect('aborted'), null)
  await locks.close()
})

test('a lock that is garbage collected without a release stays held, and one warning names it', async () => {
  const { stdout } = await node(
    `
    import { LockService } from '${index}'
    const warnings = []
    process.on('warning', ({ name, message }) => warnings.push(name + ': ' + message))
    const locks = await LockService.connect('memory:dropped')
    const collect = async () => {
      for (let i = 0; i < 20; i++) {
        globalThis.gc()
        await new Promise((resolve) => setTimeout(resolve, 10))
      }
    }
    const { signal } = await locks.acquire('watched')
    await locks.acquire('until it expires', { renew: false })
    await (await locks.acquire('released')).release()
    await locks.using('lent', collect)
    await collect()
    console.log(warnings.length, signal.aborted)
    await locks.acquire('dropped')
    while (warnings.length === 0) await collect()
    await locks.acquire('dropped, too')
    await collect()
    console.log(warnings.length, warnings[0])
    console.log((await locks.list()).map(({ name }) => name).join())
    await locks.close()
    `,
    '--expose-gc',
  )
  const [before, after, held] = stdout.trim().split('\n')
  assert.equal(before, '0 false')
  assert.match(after, /^1 HoldfastWarning: the Lock of "dropped" was garbage collected while it was held/)
  assert.equal(held, 'dropped,dropped, too,until it expires,watched')
})

test('many calls with one signal add one listener to it', async () => {
  const locks = await LockService.connect('memory:cleanup')
  const warnings = []
  const collect = (warning) => warnings.push(warning.name)
  process.on('warning', collect)
  const abort = new AbortController()
  await allReject(locks, abort)
  process.off('warning', collect)
  assert.deepEqual(
    warnings.filter((name) => name === 'MaxListenersExceededWarning'),
    [],
  )
  await locks.close()
})

async function allReject(locks, abort) {
  const holder = await locks.acquire('busy')
  const waits = Array.from({ length: 40 }, () => locks.acquire('busy', { waitMs: 60_000, signal: abort.signal }))
  const settled = Promise.allSettled(waits)
  await sleep(50)
  const reason = new Error('shutting down')
  abort.abort(reason)
  for (const { status, reason: got } of await settled) {
    assert.equal(status, 'rejected')
    assert.equal(got, reason)
  }
  await holder.release()
}

test('a signal that fires inside addEventListener aborts the call', async () => {
  const locks = await LockService.connect('memory:cleanup')
  const reason = new Error('at once')
  const signal = {
    aborted: false,
    reason,
    addEventListener: (_type, listener) => listener.call(signal),
    removeEventListener() {},
  }
  await assert.rejects(locks.acquire('eager', { signal }), (error) => error === reason)
  await until('the name is free', async () => (await locks.inspect('eager')) === null)
  await locks.close()
})

test('the addon may be loaded several times in one thread', async () => {
  const { stdout } = await node(`
    import { createRequire } from 'node:module'
    import { fileURLToPath } from 'node:url'
    const require = createRequire('${index}')
    const path = fileURLToPath('${index}')
    const load = () => {
      for (const key of Object.keys(require.cache)) if (key.includes('holdfast') || key.startsWith(path.slice(0, -8))) delete require.cache[key]
      return require(path).LockService
    }
    const services = []
    for (let i = 0; i < 3; i++) services.push(await load().connect('memory:again'))
    for (const locks of services) console.log(await locks.using('n', async (lock) => (await null, lock.isHeld)))
    const lock = await services[0].acquire('n')
    console.log(await services[2].tryAcquire('n'))
    await lock.release()
    await Promise.all(services.map((locks) => locks.close()))
    console.log('end')
  `)
  assert.deepEqual(stdout.trim().split('\n'), ['true', 'true', 'true', 'null', 'end'])
})
