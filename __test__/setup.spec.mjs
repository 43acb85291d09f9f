// The set-up of the commands: without Rust each of them ends with one message.
import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, test } from 'node:test'
import { root } from './readme/blocks.mjs'

const COMMANDS = ['build.mjs --release', 'test.mjs', 'demo.mjs']

describe('a machine without Rust', () => {
  let folder
  before(() => {
    // A copy of what the commands read before the build; it has no addon.
    folder = mkdtempSync(join(tmpdir(), 'holdfast-setup-'))
    for (const path of ['scripts', 'Cargo.toml']) cpSync(join(root, path), join(folder, path), { recursive: true })
    mkdirSync(join(folder, 'bin'))
  })
  after(() => rmSync(folder, { recursive: true, force: true }))

  const [, oldest] = /^rust-version = "(.*)"$/m.exec(readFileSync(join(root, 'Cargo.toml'), 'utf8')) ?? []

  /** Runs a command with nothing but the folder `bin` on the PATH, and checks that it prints one line and ends with 1. */
  function assertOneLine(command, problem) {
    const [script, ...args] = command.split(' ')
    const { status, stdout, stderr } = spawnSync(process.execPath, [join(folder, 'scripts', script), ...args], {
      env: { ...process.env, PATH: join(folder, 'bin'), Path: join(folder, 'bin') },
      encoding: 'utf8',
      timeout: 60_000,
    })
    const action = `Install Rust ${oldest} or newer from https://rustup.rs, open a new terminal, and repeat the command.`
    assert.deepEqual(
      { status, stdout, stderr },
      { status: 1, stdout: '', stderr: `The addon is built with Rust, and ${problem}. ${action}\n` },
    )
  }

  for (const command of COMMANDS) {
    test(`node scripts/${command}`, () => assertOneLine(command, '`cargo` is not on the PATH'))
  }

  test('Rust is too old', { skip: process.platform === 'win32' && 'no shell' }, () => {
    const path = join(folder, 'bin', 'cargo')
    writeFileSync(path, '#!/bin/sh\necho "cargo 1.9.0"\n', { mode: 0o755 })
    assertOneLine('build.mjs', '`cargo` has the version 1.9')
    rmSync(path)
  })
})
