// The benchmark: its arguments, and a run with two contenders in one of its parts. `npm run test:bench` has the rest.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdtemp, readdir, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { describe, it } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { startContender } from '../bench/contender-process.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))
const bench = (args) => promisify(execFile)(process.execPath, ['bench/run.mjs', '--quick', ...args], { cwd: root })

describe('npm run bench -- --quick', { timeout: 240_000 }, () => {
  it('measures pairs', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'holdfast-bench-'))
    try {
      const parts = ['--only', 'pairs', '--contenders', 'holdfast,redlock']
      const { stdout } = await bench([...parts, '--out', folder])
      const rows = stdout.split('\n').filter((line) => /^\| (holdfast|redlock) \| \d/.test(line))
      const count = (name) => rows.filter((row) => row.startsWith(`| ${name} |`)).length
      // redlock only on Redis, with two loads.
      assert.equal(count('redlock'), 2, stdout)
      assert.ok(count('holdfast') > 2, stdout)
      for (const row of rows) assert.ok(parseFloat(row.split('|')[2]) > 0, row)
      const files = ['results-loop.svg', 'results.json', 'results.md', 'results.svg']
      assert.deepEqual((await readdir(folder)).sort(), files)
    } finally {
      await rm(folder, { recursive: true })
    }
  })
})

describe('a contender', () => {
  it('makes a call per loop in a measurement of 0 ms', async () => {
    const contender = await startContender('holdfast', { urls: ['memory:'] })
    try {
      const { count, p50Us } = await contender.ask({ what: 'pair', inFlight: 4, ms: 0, prefix: 'n' })
      assert.equal(count, 4)
      assert.ok(p50Us >= 0)
    } finally {
      await contender.close()
    }
  })
})

describe('the arguments', () => {
  it('rejects an unknown part', async () => {
    const failure = await bench(['--only', 'pears']).catch((error) => error)
    assert.equal(failure.code, 1)
    assert.match(
      failure.stderr,
      /--only pears: one of pairs, tls, cluster, .*, service, footprint, handoff, handoff-mongodb, postgres, postgres-rust, handoff-postgres, leases-postgres, mysql, handoff-mysql, leases-mysql/,
    )
  })

  it('rejects an unknown contender', async () => {
    const failure = await bench(['--only', 'footprint', '--contenders', 'padlock']).catch((error) => error)
    assert.equal(failure.code, 1)
    assert.match(failure.stderr, /--contenders padlock: choose from holdfast, ioredis, /)
  })
})
