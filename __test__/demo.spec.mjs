// The demo: it succeeds on every store, and its verdict fails when a lock is broken.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdirSync, mkdtempSync, readdirSync, rmSync, utimesSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { reasonToBuild } from '../scripts/demo/build.mjs'
import { Database, judge } from '../scripts/demo/database.mjs'
import { KINDS, missing, serverUrl } from './stores.mjs'

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

  // HOLDFAST_URL cannot contain a list of URLs.
  for (const kind of Object.keys(KINDS).filter((kind) => KINDS[kind].server && kind !== 'redis-quorum')) {
    test(`on ${kind}`, { timeout: TIMEOUT_MS }, async (t) => {
      if (missing(kind)) {
        assert.ok(!process.env.CI, missing(kind))
        return t.skip(missing(kind))
      }
      assertGood(await demo({ HOLDFAST_URL: serverUrl(kind) }))
    })
  }

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

test('the verdict of the demo fails for each kind of fault', () => {
  /**
   * Judges the record of two correct rounds after `change` has modified it.
   *
   * @param {(entries: any[]) => unknown} [change]
   */
  function verdict(change = () => {}) {
    const database = new Database()
    const job = (name, worker, token) => {
      database.enter(name, worker, token)
      if (!database.find(name)) {
        database.note('start', name, worker)
        database.store(name, worker, token)
      }
      database.note('leave', name, worker)
    }
    job('one', 'A', 5n)
    job('one', 'B', 6n)
    database.enter('two', 'B', 3n)
    database.note('start', 'two', 'B')
    database.note('killed', 'two', 'B')
    job('two', 'A', 4n)
    change(database.entries)
    // The order of the record decides, not the resolution of the clock.
    database.entries.forEach((entry, index) => Object.assign(entry, { at: index * 100 }))
    return judge(database.entries, ['one', 'two'], 1).map(({ ok }) => ok)
  }
  const at = (entries, what, name, worker) =>
    entries.findIndex((entry) => entry.what === what && entry.name === name && entry.worker === worker)
  const without = (what, name, worker) => (entries) => entries.splice(at(entries, what, name, worker), 1)
  const failed = { what: 'failed', name: 'two', worker: 'A', message: 'the process ended' }

  assert.deepEqual(verdict(), [true, true, true, true, true])
  assert.equal(verdict(without('finish', 'one', 'A'))[0], false, 'the job never ran')
  const again = { what: 'finish', name: 'one', worker: 'B', token: 6n }
  assert.equal(verdict((entries) => entries.push(again))[0], false, 'the job ran twice')
  assert.equal(verdict(without('leave', 'one', 'A'))[1], false, 'two processes held the lock')
  for (const token of [5n, 4n]) {
    const [, , isGrowing] = verdict((entries) => (entries[at(entries, 'enter', 'one', 'B')].token = token))
    assert.equal(isGrowing, false, `the fencing token ${token} after 5`)
  }
  assert.equal(verdict(without('killed', 'two', 'B'))[3], false, 'no process was killed')
  assert.equal(verdict(without('start', 'two', 'B'))[3], false, 'it was not killed in its job')
  assert.equal(verdict((entries) => entries.splice(at(entries, 'enter', 'two', 'A')))[3], false, 'none took over')
  assert.equal(verdict((entries) => entries.push(failed))[4], false, 'a process failed')
  assert.equal(verdict((entries) => entries.push({ ...failed, code: 'LOCK_LOST' }))[4], true, 'a lease was lost')

  const database = new Database()
  database.enter('n', 'A', 1n)
  database.enter('n', 'B', 2n)
  const stored = [database.store('n', 'A', 1n), database.store('n', 'B', 2n), database.store('n', 'B', 2n)]
  assert.deepEqual(stored, [false, true, false], 'an older fencing token and a second report are refused')
})

test('reasonToBuild names a missing or outdated build, and nothing otherwise', (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-test-'))
  t.after(() => rmSync(folder, { recursive: true, force: true }))
  for (const path of ['src/deep', 'lib', 'dist']) mkdirSync(join(folder, path), { recursive: true })
  /** Writes a file that was changed `second` seconds after the first one. */
  const write = (path, second) => {
    writeFileSync(join(folder, path), '')
    utimesSync(join(folder, path), second, second)
  }
  for (const path of ['src/deep/lib.rs', 'Cargo.toml', 'lib/index.ts', 'holdfast.some-other.node']) write(path, 0)
  assert.match(String(reasonToBuild(folder)), /no addon/)
  write(`holdfast.${process.platform}-${process.arch}-abi.node`, 1)
  write('dist/index.js', 1)
  assert.equal(reasonToBuild(folder), undefined)
  write('lib/index.ts', 2)
  assert.match(String(reasonToBuild(folder)), /^dist\/ is older than lib\//)
  write('src/deep/lib.rs', 2)
  assert.match(String(reasonToBuild(folder)), /older than its sources/)
})
