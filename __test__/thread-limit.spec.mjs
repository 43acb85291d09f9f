// A process that may not create another thread, as in a container with a limit (`pids.max`), or has no file descriptor left.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { describe, it } from 'node:test'
import { start } from './children/start.mjs'
import { SERVERS, proxySuite } from './proxy.mjs'
import { random } from './stores.mjs'
import { sleep } from './tools.mjs'

// The limit does not concern root.
const account = process.getuid?.() === 0 ? { uid: 65_534, gid: 65_534 } : {}
const env = { ...process.env, HOME: tmpdir() }

/** @param {import('node:test').TestContext} t */
async function startLimited(t, url, options = {}) {
  const child = start(t, 'thread-limit', { url, options }, { ...account, env })
  await child.next('ready')
  const ask = (request, key) => {
    child.send(request)
    return child.next(key)
  }
  return {
    connect: () => ask('connect', 'outcome'),
    use: () => ask('use', 'used'),
    /** @param {number} threads */
    limit: (threads) => execFileSync('prlimit', [`--pid=${child.pid}`, `--nproc=${threads}:`], account),
    /** Open descriptors stay open, and new ones have smaller numbers than this. @param {number} descriptors */
    limitDescriptors: (descriptors) =>
      execFileSync('prlimit', [`--pid=${child.pid}`, `--nofile=${descriptors}:`], account),
  }
}

describe('a process without a thread to spare', { skip: process.platform !== 'linux' }, () => {
  it('connect is retryable, and succeeds later', { timeout: 90_000 }, async (t) => {
    const folder = join(tmpdir(), `holdfast-${random()}`)
    const child = await startLimited(t, `sqlite:${join(folder, 'locks.sqlite')}`)
    t.after(() => rmSync(folder, { recursive: true, force: true }))
    for (const isFirst of [true, false]) {
      child.limit(1)
      const { code, retryable, message } = await child.connect()
      assert.deepEqual([code, retryable], ['LOCK_STORE', true], message)
      assert.match(message, /no thread can be created|Resource temporarily unavailable/)
      child.limit(4096)
      assert.equal(await child.connect(), 'connected', isFirst ? 'the first time' : 'with an I/O thread')
      assert.equal(await child.use(), true)
    }
  })

  for (const kind of /** @type {const} */ (['redis', 'mongodb', 'postgres', 'mysql', 'etcd', 'zookeeper'])) {
    proxySuite(kind, 'no thread to spare', {}, (test) => {
      test('host names are resolved for new connections', async ({ proxy, options }, t) => {
        const url = SERVERS[kind].url(proxy.port).replace('127.0.0.1', 'localhost')
        const child = await startLimited(t, url, options)
        assert.equal(await child.connect(), 'connected')
        assert.equal(await child.use(), true)
        // By default, tokio ends its idle threads after 10 s.
        await sleep(11_000)
        child.limit(1)
        for (let round = 0; round < 2; round++) {
          proxy.cut()
          assert.equal(await child.use(), true)
        }
      })
    })
  }
})

// SQLite has this test in Rust: `a_call_without_a_descriptor_is_retryable`.
describe('a process without a file descriptor to spare', { skip: process.platform !== 'linux' }, () => {
  for (const kind of /** @type {const} */ (['redis', 'mongodb', 'postgres', 'mysql', 'etcd', 'zookeeper'])) {
    proxySuite(kind, 'no file descriptor to spare', {}, (test) => {
      test('connect and calls fail with a retryable error, and succeed later', async ({ proxy, options }, t) => {
        const child = await startLimited(t, SERVERS[kind].url(proxy.port), { ...options, storeTimeoutMs: 4000 })
        const refused = async (/** @type {Promise<any>} */ answer) => {
          const { code, retryable, message } = await answer
          assert.deepEqual([code, retryable], ['LOCK_STORE', true], message)
          assert.match(message, /Too many open files/)
        }
        assert.equal(await child.connect(), 'connected')
        assert.equal(await child.use(), true)
        child.limitDescriptors(3)
        await refused(child.connect())
        proxy.cut()
        await refused(child.use())
        child.limitDescriptors(1024)
        assert.equal(await child.use(), true)
        assert.equal(await child.connect(), 'connected')
      })
    })
  }
})
