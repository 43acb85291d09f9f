// Runs every block of the README and of the documents. A block in a language without a runner is a failure. A block after
// `<!-- check: types -->` needs a package or a server that is not here: it is compiled, and not run.
import assert from 'node:assert/strict'
import { existsSync, readdirSync } from 'node:fs'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, test } from 'node:test'
import { installDependencies } from '../scripts/setup.mjs'
import { blocksOf, documents, read, root } from './readme/blocks.mjs'
import { runEtcdctl, runMongosh, runMysql, runPsql, runRedis, runZookeeper } from './readme/permissions.mjs'
import { Project, node } from './readme/run.mjs'
import { withMysql } from './mysql-client.mjs'
import { withPostgres } from './postgres-client.mjs'
import { missing, random, serverUrl, skip } from './stores.mjs'
import { rejection } from './tools.mjs'

const TIMEOUT_MS = 120_000
/** Their blocks need MongoDB and further packages: `__test__/from-the-gist.spec.mjs` runs them. */
const ELSEWHERE = ['docs/from/gist.md', 'docs/from/mongodb-lock.md', 'docs/from/locco.md']
const blocks = ['README.md', ...documents()].filter((path) => !ELSEWHERE.includes(path)).flatMap(blocksOf)

/** @typedef {{ times?: number, env?: NodeJS.ProcessEnv }} RunOptions */
/** @typedef {(run: { did: any, stdout: string }) => void} Check */

/** @param {string} expected @returns {[RunOptions, Check]} */
const prints = (expected) => [{}, ({ stdout }) => assert.equal(stdout, expected)]
/** @param {string} verb @param {unknown} times @param {RunOptions} [options] @returns {[RunOptions, Check]} */
const does = (verb, times, options = {}) => [options, ({ did }) => assert.equal(did[verb], times)]

/**
 * The effects of a block, besides success: by its document, and a text that only this block of the document contains.
 *
 * @type {[document: string, text: string, options: RunOptions, check: Check][]}
 */
const EXPECTED = [
  ['README.md', 'const made', {}, ({ stdout }) => assert.match(stdout, /^a report under fencing token \d+\n$/)],
  ['docs/getting-started.md', "'invoice:42', async (lock)", ...prints('invoice:42 true\nsent\n')],
  ['docs/getting-started.md', 'process.env.LOCKS_URL', ...prints('LOCK_INVALID_ARGUMENT\n')],
  [
    'docs/getting-started.md',
    'attempt.ran',
    {},
    ({ did, stdout }) => {
      assert.equal(did.makeReport, 2)
      assert.equal(stdout, 'report 2\n')
    },
  ],
  ['docs/getting-started.md', 'lock.remainingMs > 0', ...prints("[ 'account:1', 'account:2' ] true\n")],
  ['docs/getting-started.md', 'for (const row of rows)', {}, ({ did }) => assert.deepEqual(did.saved, [1, 2, 3])],
  ['docs/stores/redis-quorum.md', 'const quorum', ...prints('true\n')],
  ['docs/stores/memory.md', 'one.acquire', ...prints('null\n')],
  ['docs/fencing.md', 'accounts.updateOne', ...does('balance', 90)],
  ['docs/semaphores.md', 'answer to', ...prints("[ 'answer to a', 'answer to b', 'answer to c', 'answer to d' ] 2\n")],
  ['docs/semaphores.md', 'large.permits', ...prints('10 null\n')],
  ['docs/semaphores.md', 'deployment', ...prints('null 1\n')],
  ['docs/semaphores.md', "onStoreError: 'run'", ...prints('with a permit\n')],
  ['docs/semaphores.md', 'forceRelease()', ...prints('2 5 0 2 { job: 7 }\ntrue false\n')],
  ['docs/read-write-locks.md', 'imported', ...prints("[ 'report 1', 'report 2', 'report 3' ] imported\n")],
  [
    'docs/read-write-locks.md',
    'accounts.updateOne',
    {},
    ({ did, stdout }) => assert.deepEqual([did.balance, stdout], [90, '90\n']),
  ],
  ['docs/read-write-locks.md', 'forceRelease()', ...prints('2 2 null\n1048576 1048576\ntrue false\n')],
  // The second run is the instance with the slow clock.
  [
    'docs/recipes/cron.md',
    'reports.findOne',
    { times: 2 },
    ({ did }) => assert.deepEqual([did.makeReport, did.reports], [1, 1]),
  ],
  [
    'docs/recipes/cron.md',
    'another instance does it',
    { times: 2 },
    ({ did, stdout }) => {
      assert.equal(did.sendReport, 1)
      assert.equal(stdout, 'another instance does it, or has done it\n')
    },
  ],
  ['docs/recipes/leader.md', 'runNextTask', ...does('tasks', 1)],
  ['docs/recipes/leader.md', 'maxLeaders', ...prints('3\n')],
  ['docs/recipes/leader.md', 'locks.watch(', {}, ({ stdout }) => assert.match(stdout, /process \d+ leads\n$/)],
  [
    'docs/recipes/payment.md',
    'async function pay',
    {},
    ({ did, stdout }) => {
      assert.equal(stdout, 'receipt receipt\n')
      assert.deepEqual([did.charge.length, did.reports], [1, 1])
    },
  ],
  ['docs/recipes/payment.md', "'account:8'", ...does('balance', 90)],
  [
    'docs/recipes/migrations.md',
    'pending()',
    { times: 2 },
    ({ did }) => assert.deepEqual(did.migrated, ['001', '002']),
  ],
  ['docs/recipes/kubernetes.md', 'ping()', ...prints('true\n')],
  ['docs/recipes/telemetry.md', 'instrument(', ...does('sendReport', 1)],
  [
    'docs/recipes/telemetry.md',
    'locks.stats()',
    {},
    ({ stdout }) => assert.match(stdout, /^holdfast_held \d+\nholdfast_waiting 0\n(holdfast_[a-z_]+_total \d+\n){6}$/),
  ],
  ['docs/recipes/telemetry.md', 'holdfast:lost', ...prints('memory report true\n')],
  ['docs/recipes/fastify.md', 'skip-override', ...prints('[ 200, 200, 200 ]\n')],
  ['docs/recipes/serverless.md', 'handler(event)', ...prints("{ statusCode: 200, body: 'customer:7' }\n")],
  ['docs/errors.md', 'placeOrder', ...does('placeOrder', 1)],
  ['docs/troubleshooting.md', 'locks.inspect(', ...prints('null\n[]\n')],
  ['docs/troubleshooting.md', 'onEvent', ...prints('')],
  ['docs/faq.md', 'transferable()', ...prints('true\n')],
  ['docs/from/redlock.md', 'ExecutionError', ...does('sendReport', 0)],
  ['docs/from/advisory-locks.md', 'job:42', ...does('sendReport', 1)],
  // Twice: the table may exist already.
  ['docs/from/advisory-locks.md', 'new DataSource', { times: 2 }, ({ stdout }) => assert.equal(stdout, '')],
  ['docs/from/advisory-locks.md', 'late.rowCount', { times: 2 }, ({ stdout }) => assert.equal(stdout, '1\n0\n1\n0\n')],
  [
    'docs/from/advisory-locks.md',
    'late.affectedRows',
    { times: 2 },
    ({ stdout }) => assert.equal(stdout, '1 0\n1 0\n'),
  ],
  ['docs/from/bottleneck.md', 'partner', ...prints('report 1 0\n')],
  ['docs/from/async-mutex.md', 'makeReport', ...prints('report 1\n')],
  [
    'docs/recipes/model-calls.md',
    'Promise.all',
    {},
    ({ did }) => assert.deepEqual([did.calls, did.mostCalls], [20, 5]),
  ],
  ['docs/recipes/model-calls.md', 'tryUsing', ...prints('answer of the large model\n')],
  ['docs/recipes/model-calls.md', 'estimated', ...does('calls', 1)],
  [
    'docs/recipes/readers-and-migration.md',
    'pending()',
    {},
    ({ did }) => assert.deepEqual([did.makeReport, did.migrated], [3, ['001', '002']]),
  ],
  ['docs/from/shedlock.md', "'14m'", ...prints('done\n')],
]
const expectationsOf = ({ document, code }) =>
  EXPECTED.filter(([path, text]) => path === document && code.includes(text))

let project
/** What the compiler made of each block in TypeScript. */
const compiled = new Map()
before(async () => {
  installDependencies('bench')
  project = new Project()
  project.alsoHas('bench', 'ioredis', 'redlock', 'redlock-universal', 'redis-semaphore', '@verrou/core', 'async-mutex')
  project.alsoHas('.', 'fastify', 'node-cron', 'croner', 'rxjs', 'reflect-metadata', 'pg', 'knex', 'mysql2', 'typeorm')
  project.alsoHas('.', '@nestjs/common', '@nestjs/core', '@nestjs/schedule')
  const typed = blocks.filter(({ language }) => language === 'ts')
  const results = await project.compile(typed.map(({ code }) => code))
  typed.forEach((block, index) => compiled.set(block, results[index]))
})
after(() => project?.close())

async function runExpecting(run, block) {
  const [, , options, check] = expectationsOf(block)[0] ?? [undefined, undefined, {}, () => {}]
  check(await run(block.code, options))
}

/** Documents' files that are not programs. */
const notRun = () => {}

const runJs = (block, t, { language, code } = block) =>
  onServer({ language, code }, t, (code) => runExpecting((_, options) => project.js(code, options), block))

const RUNNERS = {
  js: runJs,
  ts(block, t) {
    const { errors, code } = compiled.get(block)
    assert.deepEqual(errors, [])
    if (block.check !== 'types') return runJs(block, t, { language: 'ts', code })
  },
  diff: runDiff,
  sh: runShell,
  redis: ({ code }, t) => runRedis(code, t),
  mongosh: ({ code }, t) => runMongosh(code, t),
  psql: ({ code }, t) => runPsql(code, t),
  mysql: ({ code }, t) => runMysql(code, t),
  etcdctl: ({ code }, t) => runEtcdctl(code, t),
  zookeeper: ({ code }, t) => runZookeeper(code, t),
  sql: notRun,
  text: notRun,
  yaml: notRun,
  // Drawings and formulas of the documents for contributors.
  '': notRun,
}

describe('every block of the README and the documents', { concurrency: 2 }, () => {
  for (const block of blocks) {
    test(`${block.document}:${block.line}, ${block.language || 'no language'}`, { timeout: TIMEOUT_MS }, (t) => {
      const run = RUNNERS[block.language]
      assert.ok(run, `no test runs a block of the language "${block.language}"`)
      assert.ok(
        block.check === undefined || (block.check === 'types' && block.language === 'ts'),
        'the comment before it',
      )
      return run(block, t)
    })
  }
})

test('every expectation matches one block', () => {
  for (const expectation of EXPECTED) {
    assert.equal(
      blocks.filter((block) => expectationsOf(block).includes(expectation)).length,
      1,
      `${expectation.slice(0, 2)}`,
    )
  }
  for (const block of blocks) assert.ok(expectationsOf(block).length <= 1, `${block.document}:${block.line}`)
})

/** Both versions do the same, on the test server. */
function runDiff(block, t) {
  return onServer(block, t, async (code) => {
    const expected = expectationsOf(block)[0]?.[3] ?? (({ did }) => assert.equal(did.sendReport, 1))
    for (const did of Object.values(await project.diff(code))) expected(did)
  })
}

const REDIS = 'redis://127.0.0.1:6379'
const SQL = {
  postgres: { example: 'postgres://127.0.0.1:5432/shop', connected: withPostgres, force: ' WITH (FORCE)' },
  mysql: { example: 'mysql://root@127.0.0.1:3306/shop', connected: withMysql, force: '' },
}

/** Runs a block that may need a server with the URL of the test server in its code, on SQL servers with a database of its own. */
async function onServer({ code, language }, t, run) {
  for (const [store, { example, connected, force }] of Object.entries(SQL)) {
    if (!code.includes(example)) continue
    if (missing(store)) return skip(t, missing(store))
    const url = String(serverUrl(store))
    const database = `readme_${random()}`
    await connected(url, (client) => client.query(`CREATE DATABASE ${database}`))
    try {
      await run(code.replaceAll(example, url.replace(/\/[^/]*$/, `/${database}`)))
    } finally {
      await connected(url, (client) => client.query(`DROP DATABASE ${database}${force}`))
    }
    return
  }
  if (language === 'diff') {
    if (missing('redis')) return skip(t, missing('redis'))
    await run(code.replaceAll(REDIS, String(serverUrl('redis'))))
  } else await run(code)
}

/** Checks that each command exists. */
async function runShell({ code }) {
  const { name, scripts } = JSON.parse(read('package.json'))
  const folder = await mkdtemp(join(tmpdir(), 'holdfast-test-'))
  const env = { HOLDFAST_URL: `sqlite:${join(folder, 'locks.sqlite')}` }
  try {
    for (const line of code.trim().split('\n')) {
      const command = line.replace(/^(\w+=\S+ )+/, '')
      if (command === `npm install ${name}`) continue
      const subcommand = command.match(new RegExp(`^npx ${name} (\\w+)`))?.[1]
      if (subcommand) {
        // `cli.spec.mjs` tests what it does.
        await node([join(root, 'bin/holdfast.mjs'), subcommand, '--help'], folder, env)
        continue
      }
      const script = command.match(/^npm (?:run )?([\w:]+)$/)?.[1]
      const [, file, rest] = (script ? scripts[script] : command)?.match(/^node (\S+)(.*)/) ?? []
      assert.ok(file && existsSync(join(root, file)), `${line}: there is no such command`)
      // The scripts have tests of their own. A relative argument is a folder that the command may create.
      const args = rest.split(' ').filter(Boolean)
      if (!script) await node([join(root, file), ...args], folder, env)
    }
  } finally {
    await rm(folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 })
  }
}

test('the example refuses a write with an older fencing token', { timeout: TIMEOUT_MS }, async () => {
  const { code } = blocksOf('docs/fencing.md').find(({ code }) => code.includes('accounts.updateOne'))
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
    'leader.mjs': () =>
      inFolder(async (_, env) => {
        const stdout = await start('leader.mjs', [], env)
        const leaders = Array.from(stdout.matchAll(/^(\d+) leads in term (\d+)$/gm), ([, pid, term]) => [
          pid,
          BigInt(term),
        ])
        const [[first], [second]] = leaders
        assert.match(stdout, new RegExp(`^${first} was killed`, 'm'))
        assert.match(stdout, new RegExp(`^${second} resigned`, 'm'))
        assert.ok(leaders.length >= 3, stdout)
        for (let i = 1; i < leaders.length; i++) {
          assert.notEqual(leaders[i][0], leaders[i - 1][0], stdout)
          assert.ok(leaders[i][1] > leaders[i - 1][1], stdout)
        }
      }),
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
