// The demo: it succeeds on every store, and its verdict is one that can fail.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdirSync, mkdtempSync, readdirSync, rmSync, utimesSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { reasonToBuild } from '../scripts/demo/build.mjs'
import { Ledger, judge } from '../scripts/demo/database.mjs'
import { Screen } from '../scripts/demo/screen.mjs'
import { KINDS, missing, serverUrl } from './stores.mjs'

const DEMO = fileURLToPath(new URL('../scripts/demo.mjs', import.meta.url))
const TIMEOUT_MS = 180_000

/** Runs the demo in a temp folder of its own, which must be empty again at the end. */
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
  // On a machine that stands still for longer than a lease, one may be lost; the verdict then takes the next one's job.
  if (!stdout.includes(' is lost: ')) {
    // Three rounds, the second of them without the one that was killed, and the late one.
    assert.equal(count(stdout, / stood aside .*, found the report$/gm), 3 + 2 + 3 + 1, stdout)
    assert.match(stdout, /ok {4}13 times a process held a lock/)
  }
  assert.match(stdout, /ok {4}the job ran to its end exactly once in 3 of 3 rounds/)
  assert.match(stdout, /ok {4}\d+ times a process held a lock, and at most 1 at a time/)
  assert.match(stdout, /ok {4}fencing tokens grew from each holder to the next in 3 of 3 rounds/)
  assert.match(stdout, /ok {4}[A-D] was killed in the middle of its job, [A-D] took over \d+\.\d s later/)
  assert.match(stdout, /\nPASS\n$/)
  // A pipe gets plain lines.
  assert.ok(!stdout.includes('\x1b'), stdout)
}

describe('npm run demo', { concurrency: 2 }, () => {
  test('on the embedded store', { timeout: TIMEOUT_MS }, async () => {
    const result = await demo()
    assertGood(result)
    assert.match(result.stdout, /Store: the embedded store, sqlite:/)
  })

  // A list of URLs does not fit into HOLDFAST_URL.
  for (const kind of Object.keys(KINDS).filter((kind) => KINDS[kind].server && kind !== 'redis-quorum')) {
    test(`on ${kind}`, { timeout: TIMEOUT_MS }, async (t) => {
      if (missing(kind)) {
        assert.ok(!process.env.CI, missing(kind))
        return t.skip(missing(kind))
      }
      assertGood(await demo({ HOLDFAST_URL: serverUrl(kind) }))
    })
  }

  test('without the lock the verdict fails', { timeout: TIMEOUT_MS }, async () => {
    const { status, stdout, left } = await demo({ HOLDFAST_DEMO_SABOTAGE: '1' })
    assert.equal(status, 1, stdout)
    assert.deepEqual(left, [])
    assert.match(stdout, /FAIL {2}the job ran to its end exactly once in 0 of 3 rounds/)
    assert.match(stdout, /FAIL {2}\d+ times a process held a lock, and at most [2-4] at a time/)
    assert.match(stdout, /FAIL {2}fencing tokens grew from each holder to the next in 0 of 3 rounds/)
    assert.match(stdout, /\nFAIL: this is not what a lock promises\n$/)
  })

  test('what cannot work ends with one sentence', { timeout: TIMEOUT_MS }, async () => {
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

  /** A record of two rounds as it should be; `change` gets it to spoil. */
  function verdict(change = () => {}) {
    const ledger = new Ledger()
    const job = (name, worker, token) => {
      ledger.enter(name, worker, token)
      if (!ledger.find(name)) {
        ledger.note('start', name, worker)
        ledger.store(name, worker, token)
      }
      ledger.note('leave', name, worker)
    }
    job('one', 'A', 5n)
    job('one', 'B', 6n)
    ledger.enter('two', 'B', 3n)
    ledger.note('start', 'two', 'B')
    ledger.note('killed', 'two', 'B')
    job('two', 'A', 4n)
    job('two', 'C', 9n)
    // The record's order is what counts, and the clock's resolution must not decide about "later".
    const spread = () => ledger.entries.forEach((entry, index) => Object.assign(entry, { at: index * 100 }))
    spread()
    change(ledger.entries, ledger)
    spread()
    return judge(ledger.entries, NAMES, 1).map(({ ok }) => ok)
  }
  const at = (entries, what, name, worker) =>
    entries.findIndex((entry) => entry.what === what && entry.name === name && entry.worker === worker)

  test('accepts what is right', () => {
    assert.deepEqual(verdict(), [true, true, true, true, true])
  })

  test('sees a job that ran twice, or never', () => {
    const again = { what: 'finish', name: 'one', worker: 'B', token: 6n }
    const [twice] = verdict((entries) => entries.splice(at(entries, 'leave', 'one', 'B'), 0, again))
    assert.equal(twice, false)
    const [never] = verdict((entries) => entries.splice(at(entries, 'finish', 'one', 'A'), 1))
    assert.equal(never, false)
  })

  test('sees two at a time', () => {
    const [, alone] = verdict((entries) => {
      const [left] = entries.splice(at(entries, 'leave', 'one', 'A'), 1)
      entries.splice(at(entries, 'enter', 'one', 'B') + 1, 0, left)
    })
    assert.equal(alone, false)
  })

  test('sees a token that does not grow', () => {
    for (const token of [5n, 4n, 0n]) {
      const [, , growing] = verdict((entries) => Object.assign(entries[at(entries, 'enter', 'one', 'B')], { token }))
      assert.equal(growing, false, `${token} after 5`)
    }
  })

  test('sees a kill that did not happen, or that nobody made good', () => {
    const killed = (change) => verdict(change)[3]
    assert.equal(killed((entries) => entries.splice(at(entries, 'killed', 'two', 'B'), 1)), false)
    assert.equal(killed((entries) => entries.splice(at(entries, 'start', 'two', 'B'), 1)), false)
    assert.equal(killed((entries) => entries.splice(at(entries, 'enter', 'two', 'A'))), false)
  })

  test('sees a failure, but takes a lost lease for what it is', () => {
    const failed = { what: 'failed', name: 'two', worker: 'C' }
    const unharmed = (more) => verdict((entries) => entries.push({ ...failed, ...more }))[4]
    assert.equal(unharmed({ message: 'the process ended' }), false)
    assert.equal(unharmed({ code: 'LOCK_LOST', message: 'lost' }), true)
  })

  test('the database refuses an older token, and a second report', () => {
    const ledger = new Ledger()
    ledger.enter('n', 'A', 1n)
    ledger.enter('n', 'B', 2n)
    assert.equal(ledger.store('n', 'A', 1n), false)
    assert.equal(ledger.find('n'), false)
    assert.equal(ledger.store('n', 'B', 2n), true)
    assert.equal(ledger.find('n'), true)
    assert.equal(ledger.store('n', 'B', 2n), false)
  })
})

describe('the display', () => {
  const terminal = (columns) => {
    const out = { isTTY: true, columns, text: '', on() {}, write: (text) => (out.text += text) }
    return out
  }

  test('a terminal sees lines that change in place, and none that wraps', (t) => {
    if (process.env.NO_COLOR || process.env.TERM === 'dumb') return t.skip('this environment asks for plain text')
    const out = terminal(60)
    const screen = new Screen(out)
    screen.round('Round 1')
    for (const worker of ['A', 'B']) screen.show(worker, 'waits', { pid: 7 })
    screen.know('A', { token: 1795232000000000n })
    screen.show('A', 'works', { step: 3 })
    screen.show('A', 'stored')
    assert.equal(count(out.text, /\x1b\[2A/g), 2, 'each change after the second line goes up two lines')
    const visible = out.text.replace(/\x1b\[[\d;]*[A-Za-z]/g, '').split('\n')
    assert.ok(visible.some((line) => line.includes('███░░')))
    assert.ok(visible.every((line) => line.length < 60), out.text)
  })

  test('a pipe sees every change once, and no progress', () => {
    const out = { ...terminal(undefined), isTTY: false }
    out.write = (text) => (out.text += text)
    const screen = new Screen(out)
    screen.round('Round 1')
    screen.show('A', 'waits', { pid: 7 })
    for (const step of [0, 1, 2]) screen.show('A', 'works', { step })
    screen.show('A', 'killed')
    assert.deepEqual([...out.text.matchAll(/pid \d+ +(\w+)/g)].map(([, state]) => state), ['waits', 'won', 'killed'])
  })
})

test('the addon is built when it is missing or older than a source, and not otherwise', () => {
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-test-'))
  try {
    const addon = join(folder, `holdfast.${process.platform}-${process.arch}-abi.node`)
    const source = join(folder, 'src', 'deep', 'lib.rs')
    mkdirSync(join(folder, 'src', 'deep'), { recursive: true })
    const others = ['Cargo.toml', 'holdfast.some-other.node'].map((name) => join(folder, name))
    for (const file of [source, ...others]) writeFileSync(file, '')
    assert.match(reasonToBuild(folder), /no addon/)
    writeFileSync(addon, '')
    const [now, later] = [new Date(), new Date(Date.now() + 60_000)]
    utimesSync(addon, now, later)
    assert.equal(reasonToBuild(folder), undefined)
    utimesSync(source, now, new Date(Date.now() + 120_000))
    assert.match(reasonToBuild(folder), /older than its sources/)
  } finally {
    rmSync(folder, { recursive: true, force: true })
  }
})
