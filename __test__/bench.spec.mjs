// The benchmark runs with every contender. No test asserts speed.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const root = fileURLToPath(new URL('..', import.meta.url))
const REDIS = [
  'holdfast',
  'ioredis',
  'ioredis-auto',
  'node-redis',
  'valkey-glide',
  'redis-semaphore',
  'redis-semaphore-auto',
  'verrou',
  'verrou-auto',
  'redlock',
  'redlock-universal',
]
const QUORUM = [
  'holdfast',
  'redlock',
  'redlock-auto',
  'redis-semaphore',
  'redis-semaphore-auto',
  'redlock-universal',
  'redlock-universal-auto',
]
const MONGODB = ['holdfast', 'gist', 'mongodb-lock', 'now-upsert']
const WAYS = ['holdfast-using', 'holdfast-options', 'holdfast-new', 'holdfast-lock']
const ALL = [...new Set([...REDIS, ...QUORUM, ...MONGODB, ...WAYS])]
const STANDALONE = /MongoDB \S+ \(standalone\)$/
const REPLICA_SET = /MongoDB \S+ \(replica set with 1 member, majority\)$/

/** The parts that have a table for each number of calls in flight. */
const FIELDS = [
  { title: /^Pairs, Redis \S+$/, contenders: [...REDIS, ...WAYS], loads: [1, 16, 64, 256, 1024] },
  { title: both(/^Pairs, /, STANDALONE), contenders: MONGODB, loads: [1, 64, 256] },
  { title: both(/^Pairs, /, REPLICA_SET), contenders: MONGODB, loads: [1, 64, 256] },
  { title: /^Pairs, Redis \S+, 0\.5 ms more per round trip$/, contenders: REDIS, loads: [1, 64, 1024], tripMs: 0.5 },
  { title: /^Pairs, Redis \S+, 2 ms more per round trip$/, contenders: REDIS, loads: [1, 64, 1024], tripMs: 2 },
  { title: /^Failed tries, Redis \S+$/, contenders: REDIS, loads: [1, 64] },
  { title: both(/^Failed tries, /, STANDALONE), contenders: MONGODB, loads: [1, 64] },
  { title: both(/^Failed tries, /, REPLICA_SET), contenders: MONGODB, loads: [1, 64] },
  { title: /^Pairs, quorum of 3 × Redis \S+$/, contenders: QUORUM, loads: [1, 64] },
  { title: /^Pairs, quorum of 5 × Redis \S+$/, contenders: QUORUM, loads: [1, 64] },
]

function both(start, end) {
  return new RegExp(start.source + end.source)
}

/** Returns the rows of a part that are about contenders, as lists of cells. */
const rowsOf = (part) =>
  part
    .split('\n')
    .filter((line) => /^\| [a-z]/.test(line))
    .map((line) => line.split('|').map((cell) => cell.trim()))

const bench = (args, env = {}) =>
  promisify(execFile)(process.execPath, ['bench/run.mjs', '--quick', ...args], {
    cwd: root,
    env: { ...process.env, ...env },
  })

describe('npm run bench -- --quick', () => {
  let sections
  before(
    async () => {
      const { stdout } = await bench([])
      sections = Object.fromEntries(
        stdout
          .split(/^## /m)
          .slice(1)
          .map((part) => [part.split('\n', 1)[0], part]),
      )
    },
    { timeout: 300_000 },
  )

  it('has every part', () => {
    const titles = Object.keys(sections)
    assert.equal(titles.length, FIELDS.length + 3, titles.join())
    assert.deepEqual([titles[0], titles[1], titles.at(-1)], ['Summary', 'Contenders', 'Import and installed size'])
  })

  for (const [index, { title, contenders, loads, tripMs }] of FIELDS.entries()) {
    it(`measures every contender at every load: ${title.source}`, () => {
      const [name, section] = Object.entries(sections)[index + 2]
      assert.match(name, title)
      const [before, ...parts] = section.split(/^### /m)
      // The exact delay depends on the load of the machine; a missing delay is a failure.
      if (tripMs) assert.ok(Number(/PING through this proxy takes (\S+) ms/.exec(before)[1]) > tripMs / 3, before)
      assert.deepEqual(
        parts.map((part) => part.split('\n', 1)[0]),
        loads.map((load) => `${load} in flight`),
      )
      for (const part of parts) {
        const rows = rowsOf(part)
        assert.deepEqual(
          rows.map(([, contender]) => contender),
          contenders,
        )
        const width = part
          .split('\n')
          .find((line) => line.startsWith('| |'))
          .split('|').length
        for (const row of rows) {
          assert.equal(row.length, width)
          for (const cell of row.slice(2, -1)) assert.ok(parseFloat(cell) > 0, row.join())
        }
      }
    })
  }

  it('compares holdfast with the fastest library at every load', () => {
    const rows = sections.Summary.split('\n')
      .filter((line) => / × \|/.test(line))
      .map((line) => line.split(' | '))
    assert.equal(
      rows.length,
      FIELDS.reduce((sum, { loads }) => sum + loads.length, 0),
    )
    for (const [, , library, ratio] of rows) {
      assert.match(library, /^(redis-semaphore|verrou|redlock|redlock-universal|mongodb-lock)(-auto)?$/)
      assert.ok(parseFloat(ratio) > 0, ratio)
    }
  })

  it('describes what every contender does and how it is configured', () => {
    const rows = rowsOf(sections.Contenders)
    assert.deepEqual(
      rows.map(([, contender]) => contender),
      ALL,
    )
    for (const [, , kind, does, setting] of rows) {
      assert.match(kind, /^(library|driver|code)$/)
      assert.match(does, /owner check/)
      assert.match(does, /fencing token/)
      assert.match(does, /renew/)
      assert.ok(setting.length > 0)
    }
  })

  it('measures import time and size of every contender', () => {
    const rows = rowsOf(sections['Import and installed size'])
    assert.deepEqual(
      rows.map(([, contender]) => contender.split(' ')[0]),
      ALL.filter((contender) => !/-auto$|^holdfast-/.test(contender)),
    )
    for (const row of rows) for (const cell of row.slice(2, -1)) assert.ok(parseFloat(cell) > 0, row.join())
  })
})

describe('npm run bench', () => {
  let folder
  before(async () => (folder = await mkdtemp(join(tmpdir(), 'holdfast-bench-'))))
  after(() => rm(folder, { recursive: true }))

  it('writes the report, the figures and the plots', { timeout: 120_000 }, async () => {
    const { stdout } = await bench(['--only', 'pairs', '--ms', '20', '--out', folder])
    const files = ['results-loop.svg', 'results.json', 'results.md', 'results.svg']
    assert.deepEqual((await readdir(folder)).sort(), files)
    const [loop, json, report, svg] = await Promise.all(files.map((file) => readFile(join(folder, file), 'utf8')))
    assert.equal(`${report}\n`, stdout)
    const { loads } = JSON.parse(json).sections.pairs[0]
    const [, section] = report.split(/^## Pairs, Redis/m)
    const shown = rowsOf(section)
      .filter(([, contender]) => contender === 'holdfast')
      .map(([, , perSecond]) => parseFloat(perSecond))
    for (const [index, [load, contenders]] of Object.entries(loads).entries()) {
      assert.deepEqual(Object.keys(contenders), [...REDIS, ...WAYS], load)
      const kept = contenders.holdfast.perSecond[1]
      assert.ok(
        Math.abs(kept / shown[index] - 1) < 0.001,
        `${load} in flight: results.json has ${kept}, results.md has ${shown[index]}`,
      )
    }
    for (const plot of [svg, loop])
      for (const contender of REDIS) assert.ok(plot.includes(`>${contender}</text>`), contender)
  })

  it('fails when a contender does not do what is measured', { timeout: 60_000 }, async () => {
    const addon = join(folder, 'busy.cjs')
    const busy = JSON.stringify({ code: 'LOCK_TIMEOUT', message: 'the name was busy', retryable: true, cause: null })
    const acquire = `acquire: async () => { throw ${JSON.stringify(busy)} }`
    await writeFile(
      addon,
      `exports.LockService = class { static { Object.assign(this.prototype, { ${acquire}, close() {} }) } }
      exports.connect = async () => new exports.LockService()`,
    )
    const failure = await bench(['--only', 'quorum'], { NAPI_RS_NATIVE_LIBRARY_PATH: addon }).catch((error) => error)
    assert.equal(failure.code, 1)
    assert.match(failure.stderr, /was busy[^]*holdfast ended with 1/)
  })

  it('rejects an unknown part', async () => {
    const failure = await bench(['--only', 'pears']).catch((error) => error)
    assert.equal(failure.code, 1)
    assert.match(failure.stderr, /--only pears: one of pairs, delayed, tries, quorum, footprint/)
  })
})

test('npm run bench:leases -- --quick measures what held leases cost', { timeout: 120_000 }, async () => {
  const { stdout } = await promisify(execFile)(process.execPath, ['bench/leases.mjs', '--quick'], { cwd: root })
  const rows = rowsOf(stdout)
  assert.deepEqual(
    rows.map(([, name]) => name),
    ['holdfast', 'redlock', 'redis-semaphore'],
  )
  for (const [, name, , ...cells] of rows) {
    const [, , cpu, requests, commands, bytes, , lost] = cells.map(parseFloat)
    // The memory growth of 200 leases is noise.
    for (const figure of [cpu, requests, commands, bytes]) assert.ok(figure > 0, `${name}: ${cells}`)
    assert.equal(lost, 0, name)
  }
})

for (const [script, contenders] of [
  ['handoff', ['holdfast', 'redlock', 'redis-semaphore', 'verrou']],
  ['handoff-mongodb', ['holdfast', 'gist', 'mongodb-lock', 'locco']],
]) {
  test(
    `npm run bench:${script} -- --quick measures the hand-offs of every contender`,
    { timeout: 180_000 },
    async () => {
      const { stdout } = await promisify(execFile)(process.execPath, [`bench/${script}.mjs`, '--quick'], { cwd: root })
      const sections = stdout.split(/^## /m).slice(1)
      const titles = ['1 waiter', '100 waiters in 4 processes', '100 waiters in 4 processes that wait for 0.5 s']
      assert.deepEqual(
        sections.map((section) => section.split('\n', 1)[0]),
        titles,
      )
      for (const [index, section] of sections.entries()) {
        const rows = rowsOf(section)
        assert.deepEqual([...new Set(rows.map(([, name]) => name))], contenders)
        for (const [, name, , ...cells] of rows) {
          // An idle waiter of holdfast may send no command in this time.
          for (const cell of cells.slice(0, -1))
            assert.ok(parseFloat(cell) > 0 || (index === 2 && name === 'holdfast'), `${name}: ${cells}`)
        }
      }
    },
  )
}
