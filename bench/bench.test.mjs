// `npm run test:bench`, some ten minutes: the benchmarks run with every contender in every part, and fail when a contender does not do
// what is measured. `npm test` has a short part of it (`__test__/commands.spec.mjs`). No test asserts speed.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { basename, join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { stubAddon } from '../__test__/stub-addon.mjs'
import { CONTENDERS } from './elections/contenders.mjs'
import { outcomeOf } from './elections/step-log.mjs'
import { TICKERS } from './elections/ticks.mjs'
import { TABLES } from './sections/calls.mjs'
import { redis, redisPairs } from './sections/stores.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))
const { postgres, mysql, etcd, zookeeper, ...others } = TABLES
/** The tables of calls, in the order of the reports. */
const CALLS = [...Object.values(others), postgres, mysql, etcd, zookeeper].flat()

const run = (program, args, env = {}) =>
  promisify(execFile)(process.execPath, [program, '--quick', ...args], { cwd: root, env: { ...process.env, ...env } })
const bench = (args, env) => run('bench/run.mjs', args, env)

/** Splits Markdown at its headings of one level. Returns the title and the text of each part. */
const split = (text, level) =>
  text
    .split(new RegExp(`^${level} `, 'm'))
    .slice(1)
    .map((part) => [part.split('\n', 1)[0], part])

/** Returns the rows of a part that are about contenders, as lists of cells. */
const rowsOf = (part) =>
  part
    .split('\n')
    .filter((line) => /^\| [a-z]/.test(line))
    .map((line) => line.split('|').map((cell) => cell.trim()))

describe('npm run bench -- --quick', () => {
  let folder, stdout, sections
  before(
    async () => {
      folder = await mkdtemp(join(tmpdir(), 'holdfast-bench-'))
      stdout = (await bench(['--out', folder])).stdout
      sections = split(stdout, '##')
    },
    { timeout: 1_200_000 },
  )
  after(() => rm(folder, { recursive: true }))

  it('measures every contender of each table with the smallest and the largest load', () => {
    const tables = sections.filter(([title]) => /^(Pairs|Failed tries), /.test(title))
    assert.equal(tables.length, CALLS.length, tables.map(([title]) => title).join())
    for (const [index, { store, loads }] of CALLS.entries()) {
      const [title, table] = tables[index]
      const parts = split(table, '###')
      assert.deepEqual(
        parts.map(([load]) => load),
        [loads[0], loads.at(-1)].map((load) => `${load} in flight`),
        title,
      )
      for (const [load, part] of parts) {
        const rows = rowsOf(part)
        assert.deepEqual(
          rows.map(([, contender]) => contender),
          store.contenders,
          `${title}, ${load}`,
        )
        // Calls per second and times. The CPU time of a process is counted in 10 ms, and may be 0.
        for (const row of rows) for (const cell of row.slice(2, 5)) assert.ok(parseFloat(cell) > 0, row.join())
      }
    }
  })

  it('has a row for each file of contenders/, and a positive first figure in each row', async () => {
    const rows = sections
      // An idle waiter may send nothing.
      .filter(([title]) => !['Summary', 'Contenders'].includes(title) && !title.includes('that wait for'))
      .flatMap(([, section]) => rowsOf(section))
    const measured = new Set(rows.map(([, contender]) => contender.split(' ')[0]))
    for (const file of await readdir(join(root, 'bench', 'contenders')))
      assert.ok(measured.has(basename(file, '.mjs')), file)
    for (const [, , ...cells] of rows)
      assert.ok(parseFloat(cells.find((cell) => /^\d/.test(cell)) ?? '') > 0, `${cells}`)
  })

  it('adds a delay of the network', () => {
    const delays = [...stdout.matchAll(/PING through this proxy takes (\S+) ms/g)].map(([, ms]) => Number(ms))
    assert.equal(delays.length, others.delayed.length)
    // The exact delay depends on the load of the machine; a missing delay is a failure.
    for (const [index, ms] of [0.5, 2].entries()) assert.ok(delays[index] > ms / 3, `${delays[index]} of ${ms} ms`)
  })

  it('writes the reports and the plots', async () => {
    const files = await readdir(folder)
    const texts = await Promise.all(files.map((file) => readFile(join(folder, file), 'utf8')))
    const ofReports = texts.filter((_, index) => files[index].endsWith('.md'))
    assert.equal(ofReports.length, split(stdout, '#').length)
    for (const report of ofReports) assert.ok(stdout.includes(report))
    assert.ok(files.includes('results.json'))
    const plots = texts.filter((_, index) => files[index].endsWith('.svg'))
    assert.equal(plots.length, 2)
    for (const plot of plots)
      for (const contender of [...redis.contenders, 'holdfast-using'])
        assert.ok(plot.includes(`>${contender}</text>`), contender)
    const [[, kept]] = Object.entries(JSON.parse(texts[files.indexOf('results.json')]).sections.pairs[0].loads)
    assert.deepEqual(Object.keys(kept), redisPairs.contenders)
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

describe('node bench/elections.mjs --quick', () => {
  it('reports the next leader of each contender, and the ticks', { timeout: 600_000 }, async () => {
    const { stdout } = await run('bench/elections.mjs', [])
    const sections = Object.fromEntries(split(stdout, '##'))
    const cellsOf = (title, name) => {
      const row = sections[title].split('\n').find((line) => line.startsWith(`| ${name} |`))
      return (row ?? assert.fail(`${title} has no row ${name}`)).split('|').map((cell) => cell.trim())
    }
    for (const [name, { store }] of Object.entries(CONTENDERS)) {
      for (const title of ['The leader resigns', 'The leader is killed']) {
        const [, , next, kept, , late] = cellsOf(title, name)
        assert.match(next, /^\d[\d.]* m?s$/, `${title}: ${name}`)
        assert.equal(kept, '0 of 1', `${title}: ${name}`)
        if (name.startsWith('holdfast')) assert.equal(late, 'never', `${title}: ${name} on ${store}`)
      }
    }
    for (const name of Object.keys(TICKERS)) {
      const counts = cellsOf('A job once per tick', name).slice(3, -1)
      assert.equal(
        counts.map(parseFloat).reduce((sum, count) => sum + count),
        2,
        `${name}: ${counts}`,
      )
      if (/once/i.test(name)) assert.equal(counts[0], '2 of 2', name)
    }
  })

  it('finds a former leader that works beside the next one', () => {
    const event = (pid, what, at) => ({ id: `${pid}`, pid, what, at })
    /** Returns the events of a job with a step every 10 ms. */
    const job = (pid, begin, end) => [
      event(pid, 'begin', begin),
      ...Array.from({ length: (end - begin) / 10 + 1 }, (_, i) => event(pid, 'step', begin + 10 * i)),
    ]
    const outcome = (...late) =>
      outcomeOf(
        [...job(1, 0, 1000), ...job(2, 6000, 9000), ...late.map((at) => event(1, 'step', at))].sort(
          (one, other) => one.at - other.at,
        ),
        { leader: { pid: 1, begin: 0 }, from: 1000, to: 9000 },
      )
    const { nextMs, idleMs, lateSteps } = outcome()
    assert.deepEqual({ nextMs, idleMs, lateSteps }, { nextMs: 5000, idleMs: 5000, lateSteps: 0 })
    // Before the next one begins it is alone.
    assert.equal(outcome(5000).lateSteps, 0)
    const { lateMs, isLateAtEnd } = outcome(7000, 7200)
    assert.deepEqual({ lateMs, isLateAtEnd }, { lateMs: 210, isLateAtEnd: false })
    assert.equal(outcome(7000, 8900).isLateAtEnd, true)
  })
})
