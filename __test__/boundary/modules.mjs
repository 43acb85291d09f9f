// How other programs load the package, and the store without a target.
import assert from 'node:assert/strict'
import { existsSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { once } from 'node:events'
import { spawn } from 'node:child_process'
import { createInterface } from 'node:readline'
import { random } from '../stores.mjs'
import { INDEX, output, runNode } from '../tools.mjs'

const USE = `
  const locks = await LockService.connect('memory:')
  const lock = await locks.acquire('x')
  console.log(lock instanceof Lock, locks instanceof LockService, await lock.release(), typeof LockService.connect)
  await locks.close()`

/** Creates a state folder, and the environment variables that select it. */
function stateFolder(t) {
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-state-'))
  t.after(() => rmSync(folder, { recursive: true, force: true }))
  // The variables of Linux, macOS and Windows.
  return { folder, env: { XDG_STATE_HOME: folder, HOME: folder, LOCALAPPDATA: folder, HOLDFAST_URL: undefined } }
}

/** Starts a process that holds `x` in its store until its stdin ends. */
async function holder(t, env) {
  const code = `
    import { LockService } from '${INDEX}'
    const locks = await LockService.connect()
    const lock = await locks.acquire('x')
    console.log(lock.fencingToken)
    process.stdin.on('end', async () => { await lock.release(); await locks.close() }).resume()`
  const child = spawn(process.execPath, ['--input-type=module', '-e', code], { env: { ...process.env, ...env } })
  t.after(() => child.kill('SIGKILL'))
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]()
  const { value } = await lines.next()
  return { token: value, end: () => (child.stdin.end(), once(child, 'exit')) }
}

const INSPECT = `
  import { LockService } from '${INDEX}'
  const locks = await LockService.connect()
  console.log((await locks.inspect('x'))?.fencingToken ?? 'free')
  await locks.close()`

export function modules(test) {
  test('CommonJS require', async () => {
    const code = `const { Lock, LockService } = require('../index.js'); (async () => {${USE}})()`
    assert.equal(await output(code, { commonjs: true }), 'true true true function')
  })

  test('ESM named imports, default import, and import()', async () => {
    for (const load of [
      `import { Lock, LockService } from '${INDEX}'`,
      `import all from '${INDEX}'; const { Lock, LockService } = all`,
      `const { Lock, LockService } = await import('${INDEX}')`,
    ]) {
      assert.equal(await output(`${load}; ${USE}`), 'true true true function', load)
    }
    const names = `import * as all from '${INDEX}'; console.log(Object.keys(all).sort().join())`
    assert.equal(
      (await output(names)).replace(',module.exports', ''),
      'Election,Lock,LockError,LockService,default,isLockError',
    )
  })

  test('require and import give the same classes', async () => {
    const code = `
      import { createRequire } from 'node:module'
      import { LockService } from '${INDEX}'
      console.log(createRequire('${INDEX}')('./index.js').LockService === LockService)`
    assert.equal(await output(code), 'true')
  })

  test('the duration of loading', async (_, t) => {
    const code = `
      const start = performance.now()
      await import('${INDEX}')
      console.log((performance.now() - start).toFixed(1))`
    // Reported only: it depends on the machine.
    t.diagnostic(`loading takes ${await output(code)} ms`)
  })

  test('without a target, every process uses the embedded store of this user', async (_, t) => {
    const { folder, env } = stateFolder(t)
    const first = await holder(t, env)
    if (process.platform === 'linux') assert.ok(existsSync(join(folder, 'holdfast', 'locks.sqlite')))
    assert.equal(await output(INSPECT, { env }), first.token)
    assert.equal(await output(INSPECT, { env: stateFolder(t).env }), 'free', 'another user’s store')
    assert.deepEqual(await first.end(), [0, null])
    assert.equal(await output(INSPECT, { env }), 'free')
  })

  test('without a target, HOLDFAST_URL selects the store', async (_, t) => {
    const { folder, env } = stateFolder(t)
    const url = `sqlite:${join(folder, `${random()}.sqlite`)}`
    const first = await holder(t, { ...env, HOLDFAST_URL: url })
    assert.equal(await output(INSPECT, { env: { ...env, HOLDFAST_URL: url } }), first.token)
    assert.equal(await output(INSPECT, { env }), 'free', 'the embedded store is another one')
    const options = INSPECT.replace('connect()', 'connect({ storeTimeoutMs: 4000 })')
    assert.equal(await output(options, { env: { ...env, HOLDFAST_URL: url } }), first.token)
    const list = INSPECT.replace('connect()', 'connect({})')
    assert.equal(await output(list, { env: { ...env, HOLDFAST_URL: url } }), first.token)
    const named = INSPECT.replace('connect()', `connect({ url: 'memory:' })`)
    assert.equal(await output(named, { env: { ...env, HOLDFAST_URL: url } }), 'free', 'a target overrides HOLDFAST_URL')
    await first.end()
  })

  test('a bad HOLDFAST_URL is an error that does not show its password', async (_, t) => {
    const code = `
      import { LockService } from '${INDEX}'
      await LockService.connect().catch((error) => console.log(error.code, error.message))`
    for (const url of ['gopher://user:hunter2@host', 'redis://user:hunter2@host/notanumber', 'hunter2']) {
      const { stdout } = await runNode(code, { env: { ...stateFolder(t).env, HOLDFAST_URL: url } })
      assert.match(stdout, /^LOCK_INVALID_ARGUMENT target /)
      assert.doesNotMatch(stdout, /hunter2/)
    }
  })
}
