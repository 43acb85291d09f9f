// The runner of `npm test`: what it returns of tests that fail.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { test } from 'node:test'

const RUNNER = new URL('../scripts/node-tests.mjs', import.meta.url)
const SPEC = `
  import { describe, test } from 'node:test'
  describe('a suite', () => {
    test('passes', () => {})
    test('fails', () => { throw new RangeError('the cause') })
    test('is omitted', { skip: 'no server' }, () => {})
  })`

test('a failure has its file, its name and its error', async (t) => {
  const folder = await mkdtemp(join(tmpdir(), 'holdfast-runner-'))
  t.after(() => rm(folder, { recursive: true, force: true }))
  const file = join(folder, 'one.spec.mjs')
  await writeFile(file, SPEC)
  const code = `const { runTests } = await import(${JSON.stringify(RUNNER.href)})
    const { seconds, ...results } = await runTests([${JSON.stringify(file)}], 1)
    process.stdout.write('\\nRESULTS' + JSON.stringify(results))`
  // The variable marks a process that `node --test` started, in which the runner would run nothing.
  const { NODE_TEST_CONTEXT: _, ...env } = process.env
  // A file: node passes the arguments of `-e` on to the processes of the tests.
  const runner = join(folder, 'runner.mjs')
  await writeFile(runner, code)
  const output = execFileSync(process.execPath, [runner], { encoding: 'utf8', env })
  const { failures, ...counts } = JSON.parse(output.split('\nRESULTS')[1])
  assert.deepEqual(counts, { passed: 1, failed: 1, skipped: ['is omitted: no server'] })
  assert.equal(failures.length, 1)
  assert.match(failures[0], /^one\.spec\.mjs: fails\nRangeError.*: the cause\n {4}at .*one\.spec\.mjs/)
})
