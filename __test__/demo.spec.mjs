// The demo: it succeeds on a file and on a server, and its verdict fails when a lock is broken.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdtempSync, readdirSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { missing, serverUrl, skip } from './stores.mjs'

const DEMO = fileURLToPath(new URL('../scripts/demo.mjs', import.meta.url))
const TIMEOUT_MS = 180_000

/** Runs the demo in a temporary folder, which must be empty at the end. */
function demo(env = {}) {
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-test-'))
  const { HOLDFAST_URL, HOLDFAST_DEMO_SABOTAGE, ...inherited } = process.env
  const options = { env: { ...inherited, TMPDIR: folder, TEMP: folder, TMP: folder, ...env }, timeout: TIMEOUT_MS }
  return new Promise((resolve) => {
    execFile(process.execPath, [DEMO, '--no-build'], options, (error, stdout, stderr) => {
      const left = readdirSync(folder).filter((name) => name.startsWith('holdfast'))
      rmSync(folder, { recursive: true, force: true })
      resolve({ status: error ? (error.code ?? error.signal) : 0, stdout, stderr, left })
    })
  })
}

const count = (text, pattern) => [...text.matchAll(pattern)].length

function assertGood({ status, stdout, stderr, left }) {
  assert.equal(status, 0, stdout + stderr)
  assert.equal(stderr, '')
  assert.deepEqual(left, [])
  assert.equal(count(stdout, /report stored$/gm), 3, stdout)
  assert.equal(count(stdout, / killed .* SIGKILL$/gm), 1, stdout)
  // If the machine stalls for longer than a lease, a lease may be lost; then the next process does the job.
  if (!stdout.includes(' is lost: ')) {
    // Three rounds, the second one without the killed process, and the late process.
    assert.equal(count(stdout, / stood aside .*, found the report$/gm), 3 + 2 + 3 + 1, stdout)
    assert.match(stdout, /ok {4}13 times a process held a lock/)
  }
  assert.match(stdout, /ok {4}the job ran to its end exactly once in 3 of 3 rounds/)
  assert.match(stdout, /ok {4}\d+ times a process held a lock, and at most 1 at a time/)
  assert.match(stdout, /ok {4}fencing tokens grew from each holder to the next in 3 of 3 rounds/)
  assert.match(stdout, /ok {4}[A-D] was killed in the middle of its job, [A-D] took over \d+\.\d s later/)
  assert.match(stdout, /\nPASS\n$/)
  // Output to a pipe has no escape sequences.
  assert.ok(!stdout.includes('\x1b'), stdout)
}

describe('npm run demo', { concurrency: 2 }, () => {
  test('on the embedded store', { timeout: TIMEOUT_MS }, async () => {
    const result = await demo()
    assertGood(result)
    assert.match(result.stdout, /Store: the embedded store, sqlite:/)
  })

  test('on a server', { timeout: TIMEOUT_MS }, async (t) => {
    const reason = missing('redis')
    if (reason) return skip(t, reason)
    assertGood(await demo({ HOLDFAST_URL: String(serverUrl('redis')) }))
  })

  test('the verdict fails when the processes ignore the lock', { timeout: TIMEOUT_MS }, async () => {
    const { status, stdout, left } = await demo({ HOLDFAST_DEMO_SABOTAGE: '1' })
    assert.equal(status, 1, stdout)
    assert.deepEqual(left, [])
    assert.match(stdout, /FAIL {2}the job ran to its end exactly once in 0 of 3 rounds/)
    assert.match(stdout, /FAIL {2}\d+ times a process held a lock, and at most [2-4] at a time/)
    assert.match(stdout, /FAIL {2}fencing tokens grew from each holder to the next in 0 of 3 rounds/)
    assert.match(stdout, /\nFAIL: this is not what a lock promises\n$/)
  })

  test('an unusable store ends the demo with a message of one sentence', { timeout: TIMEOUT_MS }, async () => {
    /** @type {[string, RegExp][]} */
    const cases = [
      ['memory:', /^demo: memory: is a store of one process/],
      ['redis://user:secret@127.0.0.1:1', /^demo: redis: connect failed/],
      ['nonsense', /^demo: target must be a URL/],
    ]
    for (const [url, expected] of cases) {
      const { status, stdout, stderr, left } = await demo({ HOLDFAST_URL: url })
      assert.equal(status, 1)
      assert.match(stderr, expected)
      assert.equal(stderr.trim().split('\n').length, 1, stderr)
      assert.ok(!(stdout + stderr).includes('secret'))
      assert.deepEqual(left, [])
    }
  })
})
