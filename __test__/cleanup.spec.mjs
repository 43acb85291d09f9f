// Clean-up after aborted calls, garbage collection and process exit: no lock is left without a holder.
import assert from 'node:assert/strict'
import { fork } from 'node:child_process'
import { getEventListeners, once } from 'node:events'
import { after, before, test } from 'node:test'
import { LockService } from '../index.js'
import { startRedis } from '../scripts/servers.mjs'
import { startProxy } from './proxy.mjs'
import { INDEX, output, rejection, sleep, until, waiting } from './tools.mjs'

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

test('a process whose call was aborted in flight releases the lock before it exits', async () => {
  const locks = await LockService.connect(redis.url)
  const child = fork(new URL('children/abort.mjs', import.meta.url), [`redis://127.0.0.1:${proxy.port}`])
  const exited = once(child, 'exit')
  await once(child, 'message')
  proxy.holdReplies()
  child.send('acquire')
  while ((await locks.inspect('aborted')) === null) await sleep(10)
  // The release does not arrive before `resume`.
  proxy.freeze()
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
  const stdout = await output(
    `
    import { LockService } from '${INDEX}'
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
    { flags: ['--expose-gc'] },
  )
  const [before, after, held] = stdout.split('\n')
  assert.equal(before, '0 false')
  assert.match(after, /^1 HoldfastWarning: the Lock of "dropped" was garbage collected while it was held/)
  assert.equal(held, 'dropped,dropped, too,until it expires,watched')
})

test('the native core has no number of a lease after its release', async () => {
  const stdout = await output(
    `
    import { createRequire } from 'node:module'
    import { LockService } from '${INDEX}'
    const { native } = createRequire('${INDEX}')('./dist/index.js')
    const known = () => [1, 2, 3, 4, 5, 6, 7, 8].filter((id) => native.describe(id) !== null).join()
    const locks = await LockService.connect('memory:numbers')
    const lock = await locks.acquire('n')
    await locks.acquireAndExecute('job', () => console.log(known()))
    await locks.using('job', (job) => job.release())
    console.log(await lock.release(), await lock.release(), known())
    await (await locks.tryAcquire('n'))[Symbol.asyncDispose]()
    const lost = await locks.using('n', () => locks.forceRelease('n')).catch(({ code }) => code)
    // A lost lock still answers as long as it exists.
    console.log(lost, known())
    await locks.close()
    `,
  )
  assert.equal(stdout, '1,2\ntrue false \nLOCK_LOST 5')
})

test('many calls with one signal add one listener to it', async () => {
  const locks = await LockService.connect('memory:cleanup')
  const abort = new AbortController()
  const holder = await locks.acquire('busy')
  const waits = Array.from({ length: 40 }, () =>
    rejection(locks.acquire('busy', { waitMs: 60_000, signal: abort.signal })),
  )
  await waiting(locks, waits.length)
  // Node warns about too many listeners of an emitter, but not of an AbortSignal.
  assert.equal(getEventListeners(abort.signal, 'abort').length, 1)
  const reason = new Error('shutting down')
  abort.abort(reason)
  for (const error of await Promise.all(waits)) assert.equal(error, reason)
  await holder.release()
  await locks.close()
})

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
  const stdout = await output(`
    import { createRequire } from 'node:module'
    import { fileURLToPath } from 'node:url'
    const require = createRequire('${INDEX}')
    const path = fileURLToPath('${INDEX}')
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
  assert.deepEqual(stdout.split('\n'), ['true', 'true', 'true', 'null', 'end'])
})
