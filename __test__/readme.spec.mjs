// Runs every block of the README, and compares its tables with the code. A block in a language without a runner is a failure.
import assert from 'node:assert/strict'
import { existsSync, readdirSync, statSync } from 'node:fs'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { after, before, describe, test } from 'node:test'
import { blocksOf, membersOf, read, root, rowsOf } from './readme/blocks.mjs'
import { runMongosh, runRedis } from './readme/permissions.mjs'
import { Project, node } from './readme/run.mjs'
import { rejection } from './tools.mjs'

const TIMEOUT_MS = 120_000
const blocks = blocksOf('README.md')

/** The effects of a block, besides success. Each text is in one block only. */
const EXPECTED = [
  [
    'locks.inspect(',
    {},
    ({ did, stdout }) => {
      assert.equal(stdout, 'null []\n')
      assert.deepEqual(
        did.charge.map(({ order, aborted }) => `${order} ${aborted}`),
        Array(2).fill('order:42 false'),
      )
      assert.ok(BigInt(did.charge[1].token) > BigInt(did.charge[0].token))
    },
  ],
  // The second run is the instance with the slow clock.
  ['reports.findOne', { times: 2 }, ({ did }) => assert.deepEqual([did.makeReport, did.reports], [1, 1])],
  ['minHoldMs: 60_000', { times: 2 }, ({ did }) => assert.equal(did.sendReport, 1)],
  ['accounts.updateOne', {}, ({ did }) => assert.equal(did.balance, 90)],
  ['placeOrder', {}, ({ did }) => assert.equal(did.placeOrder, 1)],
  ['onEvent', {}, ({ stdout }) => assert.equal(stdout, '')],
  ['isLockError(error', {}, ({ stdout }) => assert.equal(stdout, '1 done LOCK_INVALID_ARGUMENT false\nfalse\n')],
]

let project
before(() => (project = new Project()))
after(() => project?.close())

async function runExpecting(run, code) {
  const [, options, check] = EXPECTED.find(([text]) => code.includes(text)) ?? [undefined, {}, () => {}]
  check(await run(code, options))
}

const RUNNERS = {
  js: ({ code }) => runExpecting((...args) => project.js(...args), code),
  ts: ({ code }) => runExpecting((...args) => project.ts(...args), code),
  diff: runDiff,
  sh: runShell,
  redis: ({ code }, t) => runRedis(code, t),
  mongosh: ({ code }, t) => runMongosh(code, t),
}

describe('every block of the README', { concurrency: 2 }, () => {
  for (const block of blocks) {
    test(`line ${block.line}, ${block.language || 'no language'}`, { timeout: TIMEOUT_MS }, (t) => {
      const run = RUNNERS[block.language]
      assert.ok(run, `no test runs a block of the language "${block.language}"`)
      return run(block, t)
    })
  }
})

test('every expectation matches one block', () => {
  for (const [text] of EXPECTED) assert.equal(blocks.filter(({ code }) => code.includes(text)).length, 1, text)
})

/** Both versions do the job twice. */
async function runDiff({ code }) {
  for (const [side, { did }] of Object.entries(await project.diff(code))) assert.equal(did.sendReport, 2, side)
}

/** Checks that each command exists. */
async function runShell({ code }) {
  const { name, scripts } = JSON.parse(read('package.json'))
  for (const line of code.trim().split('\n')) {
    const command = line.replace(/^(\w+=\S+ )+/, '')
    if (command === `npm install ${name}`) continue
    const script = command.match(/^npm (?:run )?([\w:]+)$/)?.[1]
    const file = (script ? scripts[script] : command)?.match(/^node (\S+)/)?.[1]
    assert.ok(file && existsSync(join(root, file)), `${line}: there is no such command`)
    // The scripts have tests of their own.
    if (!script) await node([file], root, {})
  }
}

test('the example refuses a write with an older fencing token', { timeout: TIMEOUT_MS }, async () => {
  const { code } = blocks.find(({ code }) => code.includes('accounts.updateOne'))
  const later = (2n ** 53n).toString()
  const error = await rejection(project.js(code, { env: { README_FENCE: later } }))
  assert.match(error.message, /a later holder has written already/)
})

describe('every example', { concurrency: 2 }, () => {
  const files = readdirSync(join(root, 'examples')).filter((file) => file.endsWith('.mjs'))
  const inFolder = async (body) => {
    const folder = await mkdtemp(join(tmpdir(), 'holdfast-test-'))
    try {
      await body(folder, { HOLDFAST_URL: `sqlite:${join(folder, 'locks.sqlite')}` })
    } finally {
      await rm(folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 })
    }
  }
  const start = async (file, args, env) => (await node([join('examples', file), ...args], root, env)).stdout

  const tests = {
    'guarded-write.mjs': async () => {
      for (const url of [undefined, process.env.HOLDFAST_TEST_MONGODB_URL]) {
        const stdout = await start('guarded-write.mjs', url ? [url] : [], {})
        assert.match(stdout, /^quick .*: done\nslow .*: refused\nthe balance is 90$/m)
      }
    },
    'scheduled-job.mjs': () =>
      inFolder(async (folder, env) => {
        const once = () => start('scheduled-job.mjs', [folder], env)
        const outcomes = [...(await Promise.all([once(), once(), once()])), await once()]
        assert.equal(outcomes.filter((text) => /^\d+ made the report: 276\n$/.test(text)).length, 1, outcomes.join(''))
        const maker = outcomes.find((text) => text.includes('made the report:')).split(' ')[0]
        const aside = outcomes.filter((text) => text.includes(`stood aside: process ${maker} made`))
        assert.equal(aside.length, 3, outcomes.join(''))
      }),
    'transfer.mjs': () =>
      inFolder(async (folder, env) => {
        const stdout = await start('transfer.mjs', [], env)
        const [parent, child, token] = ['parent', 'child', 'token'].map((name) => `\\k<${name}>`)
        const story = [
          `(?<parent>\\d+) acquired upload:${parent}, fencing token (?<token>\\d+)`,
          `(?<child>\\d+) restored it, fencing token ${token}`,
          `${child} released it: true`,
          `${parent} sees that it is free`,
        ]
        assert.match(stdout, new RegExp(`^${story.join('\\n')}\\n$`))
      }),
  }
  for (const file of files) {
    test(file, { timeout: TIMEOUT_MS }, () => {
      assert.ok(tests[file], `no test runs examples/${file}`)
      return tests[file]()
    })
  }
})

describe('every table of the README', () => {
  const plain = (cell) => cell.replaceAll('`', '')

  /** Returns the rows of one of a section's tables. */
  function tableOf(heading, index = 0) {
    const section = read('README.md').split(`\n${heading}\n`)[1]?.split('\n## ')[0]
    const table = section?.match(/(^\|.*\|\n)+/gm)?.[index]
    assert.ok(table, `table ${index} of ${heading}`)
    const lines = table.trim().split('\n').slice(2)
    return lines.map((line) =>
      line
        .slice(1, -1)
        .split('|')
        .map((cell) => plain(cell.trim())),
    )
  }

  for (const [index, type] of ['AcquireOptions', 'ExecuteOptions', 'ConnectOptions'].entries()) {
    test(`has every member of ${type} with its default`, () => {
      const documented = new Map(tableOf('## Options', index).map(([name, value]) => [name, value]))
      assert.deepEqual([...documented.entries()].sort(), [...membersOf(type).entries()].sort())
    })
  }

  test('has every error code', () => {
    const codes = read('index.d.ts')
      .match(/^export type LockErrorCode = (.*)$/m)[1]
      .match(/LOCK_\w+/g)
    assert.deepEqual(
      tableOf('## Errors')
        .map(([code]) => code)
        .sort(),
      codes.sort(),
    )
  })

  test('names every member of Lock and LockService', () => {
    const text = read('README.md')
    for (const member of [...membersOf('Lock').keys(), ...membersOf('LockService').keys()]) {
      assert.match(text, new RegExp(`\\b${member}\\b`), member)
    }
    assert.ok(membersOf('Lock').size >= 10 && membersOf('LockService').size >= 10)
  })
})

test('all rows of a table have the same number of cells', () => {
  for (const path of ['README.md', 'docs/from-the-gist.md']) {
    assert.ok(rowsOf(path).length > 20)
    for (const table of read(path).match(/(^\|.*\|\n)+/gm)) {
      const widths = table
        .trim()
        .split('\n')
        .map((line) => line.split('|').length)
      assert.equal(new Set(widths).size, 1, table)
    }
  }
})

test('all links resolve', () => {
  const slug = (heading) =>
    heading
      .toLowerCase()
      .replace(/[^\w -]/g, '')
      .replaceAll(' ', '-')
  for (const path of [
    'README.md',
    'CONTRIBUTING.md',
    'CHANGELOG.md',
    'bench/README.md',
    ...readdirSync(join(root, 'docs')).map((file) => `docs/${file}`),
  ]) {
    for (const [, link, section] of read(path).matchAll(/\]\(([^)#]*)(?:#([^)]*))?\)/g)) {
      if (/^https?:/.test(link)) continue
      const target = link ? join(dirname(path), link) : path
      assert.ok(statSync(join(root, target), { throwIfNoEntry: false }), `${path}: ${link}`)
      const headings = section ? [...read(target).matchAll(/^#+ (.*)$/gm)].map(([, heading]) => slug(heading)) : []
      if (section) assert.ok(headings.includes(section), `${path}: ${link}#${section}`)
    }
  }
})

test('the commands of CONTRIBUTING.md exist', () => {
  const { scripts } = JSON.parse(read('package.json'))
  const commands = [...read('CONTRIBUTING.md').matchAll(/\bnpm (?:run )?(test|demo|check|bench|build[\w:]*)\b/g)]
  assert.ok(commands.length > 3)
  for (const [command, script] of commands) assert.ok(scripts[script], command)
})

test('every path in the documents and in src/lib.rs exists', () => {
  const folders = ['src', 'lib', '__test__', 'scripts', 'examples', 'bench', 'docs'].filter((folder) =>
    existsSync(join(root, folder)),
  )
  const files = folders.flatMap((folder) =>
    readdirSync(join(root, folder), { recursive: true }).map((path) => join(folder, path).replaceAll('\\', '/')),
  )
  const exists = (path) =>
    existsSync(join(root, path)) || files.some((file) => file.endsWith(`/${path.replace(/\/$/, '')}`))
  // The store of the recipe, and the reader's own file.
  const invented = ['src/engine/etcd.rs', 'distributed-locks.js']
  const documents = [
    'src/lib.rs',
    'CONTRIBUTING.md',
    'README.md',
    'bench/README.md',
    ...readdirSync(join(root, 'docs')).map((file) => `docs/${file}`),
  ]
  for (const document of documents) {
    const path = /(?<![\w/.*-])(?:\.\/)?([a-z_.][\w./-]*(?:\.(?:rs|lua|sql|mjs|ts|js|toml|json)\b|\/(?=[\s`)])))/g
    const missing = [...read(document).matchAll(path)]
      .map(([, named]) => named)
      .filter((named) => !exists(named) && !invented.includes(named))
    assert.deepEqual(missing, [], document)
  }
})
