// `npm run gates` without servers: its rows, its verdict, and a run with addons that only wait. The builds take too long for a test.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, it } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { judge, rowsOf } from '../bench/gates.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))
const { rows } = JSON.parse(await readFile(new URL('../bench/gates.json', import.meta.url), 'utf8'))

describe('npm run gates', () => {
  let folder, fast, slow
  before(async () => {
    folder = await mkdtemp(join(tmpdir(), 'holdfast-gates-'))
    ;[fast, slow] = await Promise.all([addonOf('fast', 0), addonOf('slow', 100)])
  })
  after(() => rm(folder, { recursive: true }))

  /** Writes an addon that grants everything after some milliseconds. */
  async function addonOf(name, afterMs) {
    const file = join(folder, `${name}.cjs`)
    await writeFile(
      file,
      `const { setTimeout: sleep } = require('node:timers/promises')
      exports.LockService = class { async acquire() { await sleep(${afterMs}); return 1 } setRunsJobs() {} async close() {} }
      exports.connect = async () => new exports.LockService()
      exports.release = async () => 'token 1 1000 true'
      exports.finish = async () => null
      exports.forget = () => null`,
    )
    return file
  }

  const gates = (...args) =>
    promisify(execFile)(process.execPath, ['bench/gates.mjs', '--ms', '20', ...args], { cwd: root }).then(
      ({ stdout, stderr }) => ({ code: 0, stdout, stderr }),
      (error) => error,
    )
  const memory = (base, head) => gates('--only', 'memory-pair-64', '--rounds', '4', '--base', base, '--head', head)

  it('fails when the head is slower in a second measurement, too', { timeout: 180_000 }, async () => {
    const { code, stdout, stderr } = await memory(fast, slow)
    assert.equal(code, 1, stderr)
    assert.match(stdout, /^\| memory-pair-64 \| pairs\/s \| .* \| 0\.9 \| BELOW \|/m)
    assert.match(stderr, /Once more, with twice the rounds: memory-pair-64\nmemory: /)
  })

  it('passes when the head is faster', { timeout: 180_000 }, async () => {
    const { code, stdout, stderr } = await memory(slow, fast)
    assert.equal(code, 0, stderr)
    assert.match(stdout, /^\| memory-pair-64 \| pairs\/s \| .* \| 0\.9 \| ok \|/m)
    assert.doesNotMatch(stderr, /Once more/)
  })

  it('names a wrong argument', async () => {
    const wrong = {
      '--only redis-pears-1': /--only redis-pears-1: no such row; the rows are redis-using-1, .*, zookeeper-pair-64/,
      '--base no-such-branch': /--base no-such-branch: neither a commit nor a file/,
      '--rounds 0': /--rounds 0: must be a whole number from 1 on/,
      '--update --only memory-pair-64': /--update needs all rows/,
    }
    for (const [args, message] of Object.entries(wrong)) {
      // Without addons it would build commits before it uses an argument.
      const { code, stderr } = await gates('--base', fast, '--head', fast, ...args.split(' '))
      assert.equal(code, 1, args)
      assert.match(stderr, message)
    }
  })
})

it('gates.json has the rows of the command, each with a limit', () => {
  assert.deepEqual(Object.keys(rows), rowsOf())
  for (const [name, { least, figure, comment }] of Object.entries(rows)) {
    assert.ok(least > 0.8 && least <= 1, name)
    assert.ok(figure === undefined || figure > 0, name)
    // A limit lower than usual has a reason.
    assert.ok(comment || least === (/^(redis|mongodb)/.test(name) ? 0.95 : 0.9), name)
  }
})

it('a ratio is the median of the ratios of the rounds', () => {
  const rounds = [
    { base: 4, head: 2 },
    { base: 800, head: 800 },
    { base: 1, head: 2 },
  ]
  const { ratio, low, high, base, head, isGood } = judge(rounds, true, 1)
  assert.deepEqual([ratio, low, high, base, head, isGood], [1, 0.75, 1.5, 4, 2, true])
  assert.equal(judge(rounds, true, 1.01).isGood, false)
  assert.equal(judge(rounds.slice(0, 2), true, 1).ratio, 0.75)
  // Of hand-offs and CPU time less is better.
  assert.equal(judge(rounds.slice(0, 2), false, 1).ratio, 1.5)
  assert.equal(judge(rounds.slice(1), false, 1).isGood, false)
  assert.equal(judge([{ base: NaN, head: NaN }], true, 0.95).isGood, false)
})
