// Writes the figures of the last run into the documents: `node bench/figures.mjs`. `npm run bench` does that after it has written its
// reports, and a test compares.
import { readFileSync, writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const path = (file) => new URL(`../${file}`, import.meta.url)
const read = (file) => readFileSync(path(file), 'utf8')
const one = (number) => number.toFixed(1)

/** Returns the rows of a section's tables, as lists of cells. */
function rows(file, section) {
  const [, body] = read(file).split(`\n## ${section}\n`)
  if (body === undefined) throw new Error(`${file} has no section ${section}`)
  return body
    .split('\n## ')[0]
    .split('\n')
    .filter((line) => line.startsWith('| '))
    .map((line) => line.split('|').map((cell) => cell.trim()))
}

/** Returns a cell of the first row whose first cells begin with these. */
function cell(file, section, starts, index) {
  const row = rows(file, section).find(([, ...cells]) => starts.every((start, at) => cells[at]?.startsWith(start)))
  if (!row) throw new Error(`${file}: ${section} has no row ${starts.join(', ')}`)
  return row[index]
}

/** Columns of the summary. */
const [FASTEST, USING, LOOP, FLOOR] = [4, 5, 6, 8]

/** Returns a column of the summary as numbers, by calls in flight, of the rows whose title begins with `title`. */
function summary(title, column) {
  const found = rows('bench/results.md', 'Summary').filter(([, name]) => title.test(name))
  return Object.fromEntries(found.map((row) => [row[2], parseFloat(row[column])]))
}

const REDIS = /^Pairs, Redis [\d.]+$/
const MONGODB = /^Pairs, MongoDB/
/** Returns the least and the greatest number. */
const ends = (...all) => [Math.min(...all), Math.max(...all)]
/** The same of all rows of the summary. `title` may match several tables. */
const range = (title, column) =>
  ends(
    ...rows('bench/results.md', 'Summary')
      .filter(([, name]) => title.test(name))
      .map((row) => parseFloat(row[column])),
  )

const HANDOFF = 'bench/results-handoff.md'
const IDLE = '100 waiters in 4 processes that wait for 10 s'
const LOADS = ['1 waiter', '10 waiters in one process', '100 waiters in one process', '100 waiters in 4 processes']
const medians = (file) => LOADS.map((load) => Number(cell(file, load, ['holdfast'], 4)))
const idle = (name) => Number(cell(HANDOFF, IDLE, [name, 'default'], 4))
const lease = (index) => cell('bench/results-leases.md', 'A ttl of 30 s, for 30 s', ['holdfast'], index)
const server = (start) => cell('docs/speed.md', 'The server', [start], 2)
const size = (name) => one(Number(cell('bench/results.md', 'Import and installed size', [name], 4)))

const POSTGRES = 'bench/results-postgres.md'
const MARIADB = 'bench/results-mysql.md'
const ETCD = 'bench/results-etcd.md'
const ZOOKEEPER = 'bench/results-zookeeper.md'
/** Columns of the pairs. */
const [PER_SECOND, P50, LOOP_US, CLIENT_CPU, SERVER_CPU, RATIO] = [2, 3, 5, 6, 7, 9]
/** The ratio of the pairs by the same driver in Rust. */
const RUST_RATIO = 8

/** Returns a cell of the pairs on an SQL server as a number. */
function pairs(file, load, contender, index, heading = 'Pairs,') {
  const [, section = ''] = read(file).split(new RegExp(`^## ${heading} .*$`, 'm'))
  const [, part = ''] = section.split(`\n### ${load} in flight\n`)
  const row = part.split('\n### ')[0].match(new RegExp(`^\\| ${contender} \\|.*$`, 'm'))
  if (!row) throw new Error(`${file}: no pairs of ${contender} with ${load} in flight`)
  return parseFloat(row[0].split('|')[index])
}

/** Formats microseconds as milliseconds. */
const ms = (us) => (us / 1000).toFixed(2)
const p50 = (file, contender) => ms(pairs(file, 1, contender, P50))
const cpu = (file) => (pairs(file, 64, 'holdfast', CLIENT_CPU) + pairs(file, 64, 'holdfast', SERVER_CPU)).toFixed(0)
const handOff = (file, load, index = 4) => cell(file, load, ['holdfast', 'default'], index)
const PROCESSES = '16 waiters in 16 processes'
const TEN = '10 waiters in one process'
const times = (file, library) => [1, 64, 256].map((load) => one(pairs(file, load, library, RATIO)))
const leasesCost = (file, index) => cell(file, '10000 leases with a ttl of 30 s, for 30 s', ['holdfast'], index)

/** The sentences with figures, by file: `#` is a figure. */
const SENTENCES = {
  'README.md': () => [
    ['`using` completes # to # times as many locks per second', range(REDIS, USING).map(one)],
    ['an attempt for a busy name is # to # times as fast', range(/^Failed tries, Redis/, FASTEST).map(one)],
    ['reach up to # times as many calls per second as holdfast', [one(1 / range(MONGODB, FLOOR)[0])]],
    ['wakes the next waiter in # ms', [cell(HANDOFF, '1 waiter', ['holdfast', 'default'], 4)]],
    [
      'redlock with default settings takes # ms',
      [Number(cell(HANDOFF, '1 waiter', ['redlock', 'default'], 4)).toFixed(0)],
    ],
    ['send # commands per process and second', [idle('holdfast').toFixed(2)]],
    ['with redlock they send #', [idle('redlock').toFixed(0)]],
    ['take # % of a core and # bytes each', [lease(5).split(' ')[0], lease(3).split(' ')[0]]],
    [
      'costs Redis # µs of CPU time; without them # µs',
      [server('four plain commands ('), server('`SET NX PX`, and a script')],
    ],
    [
      '**# MiB**, native | # MiB | # MiB | # MiB | # MiB',
      ['holdfast', 'redlock (', 'redlock-universal (', 'redis-semaphore (', 'verrou ('].map(size),
    ],
  ],
  'docs/compare.md': () => [
    [
      '# times the calls per second of the fastest of the four one at a time, # with 16 in flight, # with 64, # with 256, # with 1024, ' +
        'and # to # times those of ioredis without a library. The event-loop time is # to # times',
      [...Object.values(summary(REDIS, FASTEST)), ...range(REDIS, FLOOR), ...range(REDIS, LOOP)].map(one),
    ],
    [
      'An attempt for a busy name: # times the calls per second one at a time, # times with 64',
      Object.values(summary(/^Failed tries, Redis/, FASTEST)).map(one),
    ],
    ['all are similar (# to # times the fastest)', range(/^Pairs, Redis.* more per round trip$/, FASTEST).map(one)],
    [
      'Quorum of three nodes: # to # times the fastest; of five nodes # to # times',
      [3, 5].flatMap((size) => range(new RegExp(`^Pairs, quorum of ${size}`), FASTEST).map(one)),
    ],
    ['From a release to the next grant: # to # ms', ends(...medians(HANDOFF)).map(one)],
    ['MongoDB: # to # times the calls per second of the gist', range(MONGODB, FLOOR).map(one)],
    ['holdfast has # MiB', [size('holdfast')]],
  ],
  'docs/stores/mongodb.md': () => [
    [
      'From a release to the next grant # to # ms on a replica set',
      ends(...medians('bench/results-handoff-mongodb.md')).map((number) => number.toFixed(0)),
    ],
    [
      '# to # times the pairs per second of `mongodb-lock`, # to # times those of the gist',
      [...range(MONGODB, FASTEST), ...range(MONGODB, FLOOR)].map(one),
    ],
  ],
  'docs/speed-sql.md': () => [
    [
      'a pair of bare commits takes # ms on PostgreSQL and # ms on MariaDB, and a pair of calls for an advisory lock # ms',
      [p50(POSTGRES, 'bare-commits'), p50(MARIADB, 'bare-commits'), p50(POSTGRES, 'advisory-locks')],
    ],
    ['A pair of holdfast takes # and # ms', [p50(POSTGRES, 'holdfast'), p50(MARIADB, 'holdfast')]],
    [
      '# and # times the bare commits with 64 in flight',
      [POSTGRES, MARIADB].map((file) => one(pairs(file, 64, 'bare-commits', RATIO))),
    ],
    ['# µs per pair on PostgreSQL, # on MariaDB', [POSTGRES, MARIADB].map(cpu)],
    [
      'holdfast makes # times the pairs of advisory locks that one connection pipelines, and # times with',
      [64, 256].map((load) => pairs(POSTGRES, load, 'advisory-pipelined-1', RUST_RATIO, 'By the same').toFixed(2)),
    ],
    [
      'It takes # ms, # times the sum of four round trips and a commit',
      [handOff(POSTGRES, '1 waiter'), handOff(POSTGRES, '1 waiter', 8)],
    ],
    ['the client needs # µs of CPU per pair', [pairs(POSTGRES, 64, 'holdfast', CLIENT_CPU).toFixed(0)]],
    ['the event loop is busy for # µs per pair', [pairs(POSTGRES, 1, 'holdfast', LOOP_US).toFixed(0)]],
    ['# ms between 16 processes', [one(Number(handOff(MARIADB, PROCESSES)))]],
  ],
  'docs/stores/postgresql.md': () => [
    [
      'A hand-off takes # ms, # times a round trip on an idle connection',
      [handOff(POSTGRES, '1 waiter'), handOff(POSTGRES, '1 waiter', 7)],
    ],
  ],
  'docs/stores/mysql.md': () => [
    [
      'a hand-off takes # ms within a process, and # ms between 16 processes',
      ['1 waiter', PROCESSES].map((load) => one(Number(handOff(MARIADB, load)))),
    ],
  ],
  'docs/stores/etcd.md': () => [
    ['a pair of `acquire` and `release` takes # ms with one call in flight', [p50(ETCD, 'holdfast')]],
    ['# times the pairs per second of `etcd3`, # times with 64 in flight, # times with 256', times(ETCD, 'etcd3')],
    ['A hand-off with ten waiters takes # ms, # times a commit', [handOff(ETCD, TEN), handOff(ETCD, TEN, 7)]],
    ['10 000 leases with a ttl of 30 s cost # % of a core', [leasesCost(ETCD, 2)]],
  ],
  'docs/stores/zookeeper.md': () => [
    ['a pair of `acquire` and `release` takes # ms with one call in flight', [p50(ZOOKEEPER, 'holdfast')]],
    [
      '# times the pairs per second of the recipe by `node-zookeeper-client`, # times with 64 in flight, # times with 256',
      times(ZOOKEEPER, 'node-zookeeper-client'),
    ],
    [
      'A hand-off with ten waiters takes # ms, # ms with that client',
      ['holdfast', 'node-zookeeper-client'].map((name) => cell(ZOOKEEPER, TEN, [name], 4)),
    ],
    [
      '10 000 leases with a ttl of 30 s cost # % of a core, and the server # %',
      [2, 3].map((index) => leasesCost(ZOOKEEPER, index)),
    ],
  ],
  'docs/stores/redis-quorum.md': () => [
    [
      '# to # times the pairs per second of the fastest of the compared libraries',
      range(/^Pairs, quorum/, FASTEST).map(one),
    ],
  ],
}

/** Replaces the figures of one sentence, which the text has exactly once. */
function withSentence(file, text, sentence, figures) {
  const pattern = sentence
    .split('#')
    .map((part) => part.replaceAll(/[.*+?^${}()|[\]\\]/g, '\\$&').replaceAll(/\s+/g, '\\s+'))
    .join('(\\d[\\d.]*)')
  const found = [...text.matchAll(new RegExp(pattern, 'dg'))]
  if (found.length !== 1)
    throw new Error(`${file} has ${found.length} sentences "${sentence}": change it or bench/figures.mjs`)
  const spans = found[0].indices?.slice(1) ?? []
  if (spans.length !== figures.length || figures.some((figure) => !/^\d[\d.]*$/.test(figure)))
    throw new Error(`${file}: "${sentence}" has the figures ${figures}`)
  return spans.reduceRight((changed, [from, to], at) => changed.slice(0, from) + figures[at] + changed.slice(to), text)
}

const COLUMNS = ['1', '16', '64', '200', '256', '1024']
const TABLE = /(<!-- from the results: node bench\/figures\.mjs -->\n)[^]*?(\n<!-- end -->)/

/** Formats the table of docs/speed.md: the ratios of the last run. */
function ratios() {
  const titles = [...new Set(rows('bench/results.md', 'Summary').map(([, title]) => title))]
  /** @type {[RegExp, number, string][]} */
  const kinds = [
    [/^Pairs, Redis/, USING, '`using`, the fastest library'],
    [/^Pairs, MongoDB/, FLOOR, '`acquire`, the gist'],
    [/^Pairs, quorum/, FASTEST, '`acquire`, the fastest library'],
    [/^HTTP service/, FASTEST, '`using`, the fastest library'],
  ]
  const lines = kinds.flatMap(([kind, column, what]) =>
    titles
      .filter((title) => kind.test(title))
      .flatMap((title) => {
        const found = rows('bench/results.md', 'Summary').filter(([, name]) => name === title)
        const byLoad = new Map()
        for (const row of found) {
          const [load, ...rest] = row[2].split(' in flight')
          const key = `${title}${rest.join('')}`
          byLoad.set(key, { ...byLoad.get(key), [load]: row[column].split(' ')[0] })
        }
        return [...byLoad]
          .filter(([, cells]) => Object.values(cells).some(Boolean))
          .map(([name, cells]) => `| ${name} | ${what} | ${COLUMNS.map((load) => cells[load] ?? '').join(' | ')} |`)
      }),
  )
  const head = `| calls per second | holdfast's call, divided by | ${COLUMNS.join(' | ')} |`
  return [head, `|---|---|${'---:|'.repeat(COLUMNS.length)}`, ...lines].join('\n')
}

/** The rows of the table of docs/speed-sql.md. @type {[string, string, string][]} */
const SQL_ROWS = [
  ['PostgreSQL: `acquire` and `release`', POSTGRES, 'holdfast'],
  ['two bare commits, the second one asynchronous', POSTGRES, 'bare-commits'],
  ['advisory locks, a pool of 10', POSTGRES, 'advisory-locks'],
  ['advisory locks, one connection that pipelines', POSTGRES, 'advisory-pipelined'],
  ['verrou on Knex', POSTGRES, 'verrou-knex'],
  ['MariaDB: `acquire` and `release`', MARIADB, 'holdfast'],
  ['two bare commits', MARIADB, 'bare-commits'],
  ['`GET_LOCK`, a pool of 10', MARIADB, 'get-lock'],
]

/** Formats the table of docs/speed-sql.md: pairs per second, with three digits that count. */
function pairsOnSql() {
  const count = (number) => Number(number.toPrecision(3)).toLocaleString('en').replaceAll(',', ' ')
  const lines = SQL_ROWS.map(([what, file, contender]) => {
    const cells = [1, 64, 256].map((load) => count(pairs(file, load, contender, PER_SECOND)))
    return `| ${what} | ${cells.join(' | ')} |`
  })
  return ['| | 1 in flight | 64 | 256 |', '|---|---:|---:|---:|', ...lines].join('\n')
}

/** The tables, by file. */
const TABLES = { 'docs/speed.md': ratios, 'docs/speed-sql.md': pairsOnSql }

/** Returns each document with the figures of the last run, by file. */
export function documentsWithFigures() {
  const documents = Object.fromEntries(
    Object.entries(SENTENCES).map(([file, sentences]) => [
      file,
      sentences().reduce((text, [sentence, figures]) => withSentence(file, text, sentence, figures), read(file)),
    ]),
  )
  for (const [file, table] of Object.entries(TABLES)) {
    const text = documents[file] ?? read(file)
    if (!TABLE.test(text)) throw new Error(`${file} has no place for its table`)
    documents[file] = text.replace(TABLE, (_, start, end) => `${start}\n${table()}\n${end}`)
  }
  return documents
}

/** Writes the figures of the last run into the documents. */
export function writeFigures() {
  for (const [file, text] of Object.entries(documentsWithFigures())) writeFileSync(path(file), text)
}

if (process.argv[1] === fileURLToPath(import.meta.url)) writeFigures()
