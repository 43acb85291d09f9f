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
import { Screen } from '../scripts/demo/screen.mjs'
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

describe('the verdict', () => {
  const NAMES = ['one', 'two']

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
    job('two', 'C', 9n)
    // The order of the record decides, not the resolution of the clock.
    const spread = () => database.entries.forEach((entry, index) => Object.assign(entry, { at: index * 100 }))
    spread()
    change(database.entries)
    spread()
    return judge(database.entries, NAMES, 1).map(({ ok }) => ok)
  }
  const at = (entries, what, name, worker) =>
    entries.findIndex((entry) => entry.what === what && entry.name === name && entry.worker === worker)

  test('accepts a correct record', () => {
    assert.deepEqual(verdict(), [true, true, true, true, true])
  })

  test('fails when a job ran twice or never', () => {
    const again = { what: 'finish', name: 'one', worker: 'B', token: 6n }
    const [twice] = verdict((entries) => entries.splice(at(entries, 'leave', 'one', 'B'), 0, again))
    assert.equal(twice, false)
    const [never] = verdict((entries) => entries.splice(at(entries, 'finish', 'one', 'A'), 1))
    assert.equal(never, false)
  })

  test('fails when two processes held the lock at the same time', () => {
    const [, isExclusive] = verdict((entries) => {
      const [left] = entries.splice(at(entries, 'leave', 'one', 'A'), 1)
      entries.splice(at(entries, 'enter', 'one', 'B') + 1, 0, left)
    })
    assert.equal(isExclusive, false)
  })

  test('fails when a fencing token does not grow', () => {
    for (const token of [5n, 4n, 0n]) {
      const [, , growing] = verdict((entries) => Object.assign(entries[at(entries, 'enter', 'one', 'B')], { token }))
      assert.equal(growing, false, `${token} after 5`)
    }
  })

  test('fails when the kill did not happen, or no process took over', () => {
    const killed = (change) => verdict(change)[3]
    assert.equal(
      killed((entries) => entries.splice(at(entries, 'killed', 'two', 'B'), 1)),
      false,
    )
    assert.equal(
      killed((entries) => entries.splice(at(entries, 'start', 'two', 'B'), 1)),
      false,
    )
    assert.equal(
      killed((entries) => entries.splice(at(entries, 'enter', 'two', 'A'))),
      false,
    )
  })

  test('fails when a process failed, but accepts a lost lease', () => {
    const failed = { what: 'failed', name: 'two', worker: 'C' }
    const isAccepted = (more) => verdict((entries) => entries.push({ ...failed, ...more }))[4]
    assert.equal(isAccepted({ message: 'the process ended' }), false)
    assert.equal(isAccepted({ code: 'LOCK_LOST', message: 'lost' }), true)
  })

  test('the database refuses an older fencing token and a second report', () => {
    const database = new Database()
    database.enter('n', 'A', 1n)
    database.enter('n', 'B', 2n)
    assert.equal(database.store('n', 'A', 1n), false)
    assert.equal(database.find('n'), false)
    assert.equal(database.store('n', 'B', 2n), true)
    assert.equal(database.find('n'), true)
    assert.equal(database.store('n', 'B', 2n), false)
  })
})

describe('the display', () => {
  const terminal = (columns) => {
    const out = { isTTY: true, columns, text: '', on() {}, write: (text) => (out.text += text) }
    return out
  }

  test('a terminal gets lines that are redrawn in place and never wrap', (t) => {
    if (process.env.NO_COLOR || process.env.TERM === 'dumb') return t.skip('this environment requests plain text')
    const out = terminal(60)
    const screen = new Screen(out)
    screen.round('Round 1')
    for (const worker of ['A', 'B']) screen.show(worker, 'waits', { pid: 7 })
    screen.setDetails('A', { token: 1795232000000000n })
    screen.show('A', 'works', { step: 3 })
    screen.show('A', 'stored')
    assert.equal(count(out.text, /\x1b\[2A/g), 2, 'each change after the second line goes up two lines')
    const visible = out.text.replace(/\x1b\[[\d;]*[A-Za-z]/g, '').split('\n')
    assert.ok(visible.some((line) => line.includes('███░░')))
    assert.ok(
      visible.every((line) => line.length < 60),
      out.text,
    )
  })

  test('a pipe gets every change once and no progress', () => {
    const out = { ...terminal(undefined), isTTY: false }
    out.write = (text) => (out.text += text)
    const screen = new Screen(out)
    screen.round('Round 1')
    screen.show('A', 'waits', { pid: 7 })
    for (const step of [0, 1, 2]) screen.show('A', 'works', { step })
    screen.show('A', 'killed')
    assert.deepEqual(
      [...out.text.matchAll(/pid \d+ +(\w+)/g)].map(([, state]) => state),
      ['waits', 'won', 'killed'],
    )
  })
})

test('reasonToBuild names a missing or outdated addon, and nothing otherwise', () => {
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-test-'))
  try {
    const addon = join(folder, `holdfast.${process.platform}-${process.arch}-abi.node`)
    const source = join(folder, 'src', 'deep', 'lib.rs')
    mkdirSync(join(folder, 'src', 'deep'), { recursive: true })
    const others = ['Cargo.toml', 'holdfast.some-other.node'].map((name) => join(folder, name))
    for (const file of [source, ...others]) writeFileSync(file, '')
    assert.match(String(reasonToBuild(folder)), /no addon/)
    writeFileSync(addon, '')
    const [now, later] = [new Date(), new Date(Date.now() + 60_000)]
    utimesSync(addon, now, later)
    assert.equal(reasonToBuild(folder), undefined)
    utimesSync(source, now, new Date(Date.now() + 120_000))
    assert.match(String(reasonToBuild(folder)), /older than its sources/)
  } finally {
    rmSync(folder, { recursive: true, force: true })
  }
})
