// The commands of this project: what a newcomer sees without Rust, and a failure in the output of `npm test`.
import assert from 'node:assert/strict'
import { execFileSync, spawnSync } from 'node:child_process'
import { chmodSync, cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, test } from 'node:test'
import { account } from '../scripts/programs.mjs'
import { root } from './readme/blocks.mjs'

let folder
before(() => (folder = mkdtempSync(join(tmpdir(), 'holdfast-commands-'))))
after(() => rmSync(folder, { recursive: true, force: true }))

test('each command ends with one line on a machine without Rust, or with an old one', () => {
  // A copy of what the commands read before the build; it has no addon.
  for (const path of ['scripts', 'Cargo.toml']) cpSync(join(root, path), join(folder, path), { recursive: true })
  const bin = join(folder, 'bin')
  mkdirSync(bin)
  const [, oldest] = /^rust-version = "(.*)"$/m.exec(readFileSync(join(root, 'Cargo.toml'), 'utf8')) ?? []
  const assertOneLine = (command, problem) => {
    const { status, stdout, stderr } = spawnSync(process.execPath, [join(folder, 'scripts', command)], {
      env: { ...process.env, PATH: bin, Path: bin },
      encoding: 'utf8',
      timeout: 60_000,
    })
    const action = `Install Rust ${oldest} or newer from https://rustup.rs, open a new terminal, and repeat the command.`
    const expected = `The addon is built with Rust, and ${problem}. ${action}\n`
    assert.deepEqual({ status, stdout, stderr }, { status: 1, stdout: '', stderr: expected }, command)
  }
  for (const command of ['build.mjs', 'test.mjs', 'demo.mjs']) assertOneLine(command, '`cargo` is not on the PATH')
  if (process.platform === 'win32') return
  writeFileSync(join(bin, 'cargo'), '#!/bin/sh\necho "cargo 1.9.0"\n', { mode: 0o755 })
  assertOneLine('build.mjs', '`cargo` has the version 1.9')
})

test(
  'as root, a server in a closed folder is refused with what to do',
  { skip: process.getuid?.() !== 0 },
  async () => {
    const closed = join(folder, 'closed')
    const program = join(closed, 'server')
    mkdirSync(closed)
    writeFileSync(program, '', { mode: 0o755 })
    chmodSync(folder, 0o711)
    assert.ok(await account('postgres', program))
    chmodSync(closed, 0o700)
    const message = `${closed} is closed to other users, and server does not run as root: chmod 711 ${closed}`
    await assert.rejects(account('postgres', program), { message })
  },
)

test('npm test shows the file, the name and the error of a failed test, and counts it', () => {
  const spec = join(folder, 'one.spec.mjs')
  writeFileSync(
    spec,
    `import { describe, test } from 'node:test'
    describe('a suite', () => {
      test('passes', () => {})
      test('fails', () => { throw new RangeError('the cause') })
      test('is omitted', { skip: 'no server' }, () => {})
    })`,
  )
  // A file: node passes the arguments of `-e` on to the processes of the tests.
  const runner = join(folder, 'runner.mjs')
  const module = new URL('../scripts/node-tests.mjs', import.meta.url).href
  writeFileSync(
    runner,
    `const { runTests } = await import(${JSON.stringify(module)})
    const { seconds, ...results } = await runTests([${JSON.stringify(spec)}], 1)
    process.stdout.write('\\nRESULTS' + JSON.stringify(results))`,
  )
  // The variable marks a process that `node --test` started, in which the runner would run nothing.
  const { NODE_TEST_CONTEXT: _, ...env } = process.env
  const output = execFileSync(process.execPath, [runner], { encoding: 'utf8', env })
  const { failures, ...counts } = JSON.parse(output.split('\nRESULTS')[1])
  assert.deepEqual(counts, { passed: 1, failed: 1, skipped: ['is omitted: no server'] })
  assert.equal(failures.length, 1)
  assert.match(failures[0], /^one\.spec\.mjs: a suite: fails\nRangeError.*: the cause\n {4}at .*one\.spec\.mjs/)
})
