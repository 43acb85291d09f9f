// `npm run test:bench`, some eight minutes: the benchmark runs with every contender in every part, and fails when a contender does not do
// what is measured. `npm test` has a short part of it (`__test__/bench.spec.mjs`). No test asserts speed.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { stubAddon } from '../__test__/stub-addon.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))
const IOREDIS = [
  'ioredis',
  'ioredis-auto',
  'redis-semaphore',
  'redis-semaphore-auto',
  'verrou',
  'verrou-auto',
  'redlock',
  'redlock-auto',
  'redlock-universal',
  'redlock-universal-auto',
]
const REDIS = ['holdfast', ...IOREDIS, 'node-redis', 'valkey-glide']
const WAYS = ['holdfast-using', 'holdfast-observed', 'holdfast-options', 'holdfast-new', 'holdfast-lock']
const TRANSPORT = ['holdfast', 'holdfast-using', 'holdfast-lock', ...IOREDIS]
const CLUSTER = TRANSPORT.filter((name) => !name.startsWith('redlock-universal'))
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
const MONGODB_PAIRS = [...MONGODB, 'holdfast-lock']
const SERVICE = ['holdfast', 'redlock', 'redlock-auto', 'redis-semaphore', 'redis-semaphore-auto', 'no-lock']
const MYSQL = ['holdfast', 'holdfast-using', 'holdfast-lock', 'get-lock', 'bare-commits']
const MYSQL_TLS = ['holdfast', 'holdfast-using', 'get-lock']
const POSTGRES_TLS = ['holdfast', 'holdfast-using', 'verrou-knex', 'advisory-locks']
const POSTGRES = [
  'holdfast',
  'holdfast-using',
  'holdfast-lock',
  'verrou-knex',
  'advisory-locks',
  'advisory-pipelined',
  'bare-commits',
]
const ETCD = ['holdfast', 'holdfast-using', 'holdfast-lock', 'etcd3', 'etcd3-bare']
const ZOOKEEPER = ['holdfast', 'holdfast-using', 'holdfast-lock', 'node-zookeeper-client', 'node-zookeeper-client-bare']
const RUST = ['holdfast', 'advisory-pipelined-1', 'advisory-pipelined-2']
const SAME_DRIVER = 'By the same Rust driver, PostgreSQL '
const STANDALONE = /MongoDB \d[\d.]+ \(standalone\)$/
const ONE_MEMBER = /MongoDB \d[\d.]+ \(replica set with 1 member, majority\)$/
const THREE_MEMBERS = /MongoDB \d[\d.]+ \(replica set with 3 members, majority\)$/

/** The tables of the report: their contenders, and the loads of a smoke test, the smallest and the largest of each. */
const TABLES = [
  { title: /^Pairs, Redis \d[\d.]+$/, contenders: [...REDIS, ...WAYS], loads: [1, 1024] },
  { title: both(/^Pairs, /, STANDALONE), contenders: MONGODB_PAIRS, loads: [1, 256] },
  { title: both(/^Pairs, /, ONE_MEMBER), contenders: MONGODB_PAIRS, loads: [1, 256] },
  { title: both(/^Pairs, /, THREE_MEMBERS), contenders: MONGODB_PAIRS, loads: [1, 256] },
  { title: /^Pairs, Redis \d[\d.]+, TLS$/, contenders: TRANSPORT, loads: [1, 1024] },
  { title: /^Pairs, Redis \d[\d.]+, Cluster of three masters$/, contenders: CLUSTER, loads: [1, 1024] },
  { title: /^Pairs, Redis \d[\d.]+, Sentinel$/, contenders: TRANSPORT, loads: [1, 1024] },
  { title: /^Pairs, Redis \d[\d.]+, 0\.5 ms more per round trip$/, contenders: REDIS, loads: [1, 1024], tripMs: 0.5 },
  { title: /^Pairs, Redis \d[\d.]+, 2 ms more per round trip$/, contenders: REDIS, loads: [1, 1024], tripMs: 2 },
  { title: /^Failed tries, Redis \d[\d.]+$/, contenders: REDIS, loads: [1, 64] },
  { title: both(/^Failed tries, /, STANDALONE), contenders: MONGODB, loads: [1, 64] },
  { title: both(/^Failed tries, /, ONE_MEMBER), contenders: MONGODB, loads: [1, 64] },
  { title: /^Pairs, quorum of 3 × Redis \d[\d.]+$/, contenders: QUORUM, loads: [1, 64] },
  { title: /^Pairs, quorum of 5 × Redis \d[\d.]+$/, contenders: QUORUM, loads: [1, 64] },
  {
    title: /^HTTP service, Redis \d[\d.]+$/,
    contenders: SERVICE,
    loads: ['200 in flight, 1 000 orders', '200 in flight, 100 000 orders'],
  },
]
const ALL = [...new Set(TABLES.flatMap(({ contenders }) => contenders))]

const WAITING = [
  '1 waiter',
  '100 waiters in 4 processes',
  '16 waiters in 16 processes',
  '100 waiters in 4 processes that wait for 0.5 s',
]
const HANDOFFS = {
  'Hand-offs': {
    contenders: ['holdfast', 'redlock', 'redis-semaphore', 'verrou'],
    titles: [...WAITING, '1 waiter, 1 ms more per round trip'],
  },
  'Hand-offs on MongoDB': { contenders: ['holdfast', 'gist', 'mongodb-lock', 'locco'], titles: WAITING },
}

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

/** Splits Markdown at its headings of one level. Returns the parts by their titles. */
const split = (text, level) =>
  Object.fromEntries(
    text
      .split(new RegExp(`^${level} `, 'm'))
      .slice(1)
      .map((part) => [part.split('\n', 1)[0], part]),
  )

/** Asserts that a section has a table for each load, with a row of figures for each contender. */
function assertTables(section, contenders, loads) {
  const [, ...parts] = section.split(/^### /m)
  assert.deepEqual(
    parts.map((part) => part.split('\n', 1)[0]),
    loads.map((load) => (typeof load === 'number' ? `${load} in flight` : load)),
  )
  for (const part of parts) {
    const rows = rowsOf(part)
    assert.deepEqual(
      rows.map(([, contender]) => contender),
      contenders,
    )
    const columns = part
      .split('\n')
      .find((line) => line.startsWith('| |'))
      .split('|')
    for (const row of rows) {
      assert.equal(row.length, columns.length)
      for (const [at, cell] of row.entries()) {
        // The service without locks sends nothing to the server, and Linux counts the CPU of processes in 10 ms.
        const mayBeZero =
          (row[1] === 'no-lock' && /server|requests|scripts|bytes/.test(columns[at])) ||
          ([POSTGRES, POSTGRES_TLS, MYSQL, MYSQL_TLS, ETCD, ZOOKEEPER, RUST].includes(contenders) &&
            /server CPU/.test(columns[at])) ||
          (contenders === RUST && /client CPU/.test(columns[at]))
        if (at > 1 && at < row.length - 1 && !(mayBeZero && parseFloat(cell) === 0))
          assert.ok(parseFloat(cell) > 0, row.join())
      }
    }
  }
}

/** The report on a server has its tables. `waiting`: the contenders of the hand-offs; `throughTls`: those of the pairs through TLS. */
function assertServer(report, title, contenders, waiting, throughTls) {
  const parts = Object.entries(split(report, '##')).filter(([title]) => !title.startsWith(SAME_DRIVER))
  const [pairs, tls, leases, handoffs] = [parts[2], parts[3], parts.at(-1), parts.slice(throughTls ? 4 : 3, -1)]
  assert.match(pairs[0], title)
  assertTables(pairs[1], contenders, [1, 256])
  if (throughTls) {
    assert.equal(tls[0], `${pairs[0]}, TLS`)
    assertTables(tls[1], throughTls, [1, 256])
  }
  assert.deepEqual(leases?.[0], '200 leases with a ttl of 3 s, for 3 s')
  assert.ok(parseFloat(rowsOf(leases?.[1] ?? '')[0][4]) > 0)
  assert.deepEqual(
    handoffs.map(([title]) => title),
    WAITING,
  )
  for (const [, part] of handoffs) assert.deepEqual([...new Set(rowsOf(part).map(([, name]) => name))], waiting)
}

describe('npm run bench -- --quick', () => {
  let folder, stdout, reports, sections
  before(
    async () => {
      folder = await mkdtemp(join(tmpdir(), 'holdfast-bench-'))
      stdout = (await bench(['--out', folder])).stdout
      reports = split(stdout, '#')
      sections = split(reports.Benchmark, '##')
    },
    { timeout: 800_000 },
  )
  after(() => rm(folder, { recursive: true }))

  it('has every part', () => {
    assert.deepEqual(Object.keys(reports), [
      'Benchmark',
      ...Object.keys(HANDOFFS),
      'PostgreSQL',
      'MariaDB',
      'etcd',
      'ZooKeeper',
      'Held leases',
    ])
    const titles = Object.keys(sections)
    assert.equal(titles.length, TABLES.length + 3, titles.join())
    assert.deepEqual([titles[0], titles[1], titles.at(-1)], ['Summary', 'Contenders', 'Import and installed size'])
  })

  for (const [index, { title, contenders, loads, tripMs }] of TABLES.entries()) {
    it(`measures every contender: ${title.source}`, () => {
      const [name, section] = Object.entries(sections)[index + 2]
      assert.match(name, title)
      assertTables(section, contenders, loads)
      // The exact delay depends on the load of the machine; a missing delay is a failure.
      if (tripMs) assert.ok(Number(/PING through this proxy takes (\S+) ms/.exec(section)?.[1]) > tripMs / 3, section)
    })
  }

  it('measures pairs, hand-offs and leases on PostgreSQL', () => {
    const waiting = ['holdfast', 'advisory-locks', 'verrou-knex']
    assertServer(reports.PostgreSQL, /^Pairs, PostgreSQL \d[\d.]+$/, POSTGRES, waiting, POSTGRES_TLS)
  })

  it('measures holdfast and advisory locks by the same Rust driver', () => {
    const [, section] =
      Object.entries(split(reports.PostgreSQL, '##')).find(([title]) => title.startsWith(SAME_DRIVER)) ?? []
    assertTables(section, RUST, [1, 64])
  })

  it('measures pairs, hand-offs and leases on MariaDB', () => {
    assertServer(reports.MariaDB, /^Pairs, MariaDB \d[\d.]+$/, MYSQL, ['holdfast', 'get-lock'], MYSQL_TLS)
  })

  it('measures pairs, hand-offs and leases on etcd and ZooKeeper', () => {
    assertServer(reports.etcd, /^Pairs, etcd \d[\d.]+$/, ETCD, ['holdfast', 'etcd3'])
    assertServer(reports.ZooKeeper, /^Pairs, ZooKeeper \d[\d.]+$/, ZOOKEEPER, ['holdfast', 'node-zookeeper-client'])
  })

  it('has the event-loop delay of the service', () => {
    const name = Object.keys(sections).find((title) => title.startsWith('HTTP service'))
    assert.match(sections[name ?? ''], /^\| \| requests per second \|.*\| event-loop delay, p99, µs \|/m)
  })

  it('compares holdfast with the fastest library at every load', () => {
    const rows = sections.Summary.split('\n')
      .filter((line) => / × \|/.test(line))
      .map((line) => line.split(' | '))
    assert.equal(
      rows.length,
      TABLES.reduce((sum, { loads }) => sum + loads.length, 0),
    )
    for (const [, , library, ratio] of rows) {
      assert.match(library, /^(redis-semaphore|verrou|redlock|redlock-universal|mongodb-lock)(-auto)?$/)
      assert.ok(parseFloat(ratio) > 0, ratio)
    }
    const withUsing = rows.filter(([title, , , , using]) => title.includes('Redis') && parseFloat(using) > 0)
    assert.equal(withUsing.length, TABLES.filter(({ contenders }) => contenders.includes('holdfast-using')).length * 2)
  })

  it('describes what every contender does and how it is configured', () => {
    const rows = rowsOf(sections.Contenders)
    assert.deepEqual(rows.map(([, contender]) => contender).sort(), [...ALL].sort())
    for (const [, , kind, does, setting] of rows) {
      assert.match(kind, /^(library|driver|code)$/)
      assert.match(does, /owner check/)
      assert.match(does, /fencing token/)
      assert.match(does, /renew/)
      assert.ok(setting.length > 0 && setting !== 'undefined')
    }
  })

  it('measures import time and size of every contender', () => {
    const rows = rowsOf(sections['Import and installed size'])
    assert.deepEqual(
      rows.map(([, contender]) => contender.split(' ')[0]).sort(),
      ALL.filter((contender) => !/-auto$|^holdfast-|^no-lock$/.test(contender)).sort(),
    )
    for (const row of rows) for (const cell of row.slice(2, -1)) assert.ok(parseFloat(cell) > 0, row.join())
  })

  for (const [report, { contenders, titles }] of Object.entries(HANDOFFS)) {
    it(`measures the hand-offs of every contender: ${report}`, () => {
      assert.match(reports[report], /A round trip \(the median [^)]+\) takes [1-9]\d* /)
      const parts = split(reports[report], '##')
      assert.deepEqual(Object.keys(parts), titles)
      for (const [title, part] of Object.entries(parts)) {
        const rows = rowsOf(part)
        assert.deepEqual([...new Set(rows.map(([, name]) => name))], contenders)
        for (const [, name, , ...cells] of rows) {
          // An idle waiter of holdfast may send no command in this time.
          const mayBeZero = title.includes('wait for') && name === 'holdfast'
          for (const cell of cells.slice(0, -1))
            assert.ok(parseFloat(cell) >= (mayBeZero ? 0 : Number.MIN_VALUE), `${name}: ${cells}`)
        }
      }
    })
  }

  it('measures what held leases cost', () => {
    const rows = rowsOf(reports['Held leases'])
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

  it('writes the reports, the figures and the plots', async () => {
    const texts = [
      'results',
      'results-handoff',
      'results-handoff-mongodb',
      'results-postgres',
      'results-mysql',
      'results-etcd',
      'results-zookeeper',
      'results-leases',
    ].map((name) => `${name}.md`)
    const plots = ['results.svg', 'results-loop.svg']
    assert.deepEqual((await readdir(folder)).sort(), [...texts, ...plots, 'results.json'].sort())
    const contents = (names) => Promise.all(names.map((name) => readFile(join(folder, name), 'utf8')))
    assert.equal((await contents(texts)).map((text) => `${text}\n`).join(''), stdout)
    const [json] = await contents(['results.json'])
    const { loads } = JSON.parse(json).sections.pairs[0]
    const [, pairs] = Object.entries(sections)[2]
    const shown = rowsOf(pairs)
      .filter(([, contender]) => contender === 'holdfast')
      .map(([, , perSecond]) => parseFloat(perSecond))
    assert.equal(shown.length, TABLES[0].loads.length)
    for (const [index, [load, contenders]] of Object.entries(loads).entries()) {
      assert.deepEqual(Object.keys(contenders), [...REDIS, ...WAYS], load)
      const kept = contenders.holdfast.perSecond[1]
      assert.ok(
        Math.abs(kept / shown[index] - 1) < 0.001,
        `${load}: results.json has ${kept}, results.md ${shown[index]}`,
      )
    }
    for (const plot of await contents(plots))
      for (const contender of [...REDIS, 'holdfast-using']) assert.ok(plot.includes(`>${contender}</text>`), contender)
  })
})

describe('a contender that does not do what is measured', { concurrency: 2 }, () => {
  let folder
  before(async () => (folder = await mkdtemp(join(tmpdir(), 'holdfast-bench-'))))
  after(() => rm(folder, { recursive: true }))

  async function assertFails(part, addon, reason) {
    const env = { NAPI_RS_NATIVE_LIBRARY_PATH: addon }
    const failure = await bench(['--only', part, '--contenders', 'holdfast'], env).catch((error) => error)
    assert.equal(failure.code, 1)
    assert.match(failure.stderr, reason)
  }

  const SILENT = /holdfast sent 0\.\d\d commands per call/
  const NO_LOCK = {
    pairs: SILENT,
    tls: SILENT,
    cluster: SILENT,
    sentinel: SILENT,
    delayed: SILENT,
    quorum: SILENT,
    tries: /was not busy[^]*holdfast ended with 1/,
    service: /order \d+ has two holders/,
    handoff: /n has two holders[^]*holdfast ended with 1/,
    'handoff-mongodb': /n has two holders[^]*holdfast ended with 1/,
    postgres: SILENT,
    'handoff-postgres': /n has two holders[^]*holdfast ended with 1/,
    mysql: SILENT,
    'handoff-mysql': /n has two holders[^]*holdfast ended with 1/,
    etcd: SILENT,
    'handoff-etcd': /n has two holders[^]*holdfast ended with 1/,
    zookeeper: SILENT,
    'handoff-zookeeper': /n has two holders[^]*holdfast ended with 1/,
    leases: /holdfast has 0 of 200 leases/,
    'leases-postgres': /holdfast lost 0 of 200 leases in 0 statements/,
    'leases-mysql': /holdfast lost 0 of 200 leases in 0 statements/,
    'leases-etcd': /holdfast lost 0 of 200 leases in 0 statements/,
    'leases-zookeeper': /holdfast lost 0 of 200 leases in 0 statements/,
  }
  for (const [part, reason] of Object.entries(NO_LOCK)) {
    it(`it grants everything: ${part}`, { timeout: 120_000 }, async () => {
      await assertFails(part, await stubAddon(folder, part, 'return 1'), reason)
    })
  }

  it('it excludes callers of its own process only: handoff', { timeout: 120_000 }, async () => {
    const acquire =
      'const before = last; let end; last = new Promise((ended) => (end = ended)); await before; return ends.push(end)'
    const more = { release: 'ends[id - 1]()', before: 'const ends = []; let last' }
    const addon = await stubAddon(folder, 'local', acquire, more)
    await assertFails('handoff', addon, /holdfast: the lock had two holders/)
  })

  const busy = JSON.stringify({ code: 'LOCK_TIMEOUT', message: 'the name was busy', retryable: true, cause: null })
  for (const part of ['pairs', 'service']) {
    it(`it grants nothing: ${part}`, { timeout: 120_000 }, async () => {
      const addon = await stubAddon(folder, `busy-${part}`, `throw ${JSON.stringify(busy)}`)
      await assertFails(part, addon, /the name was busy[^]* ended with 1/)
    })
  }
})
