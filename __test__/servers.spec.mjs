// The servers of the tests: Rust's tests start a fetched `redis-server` by its name, with the libraries that were fetched with it. Servers
// that refuse to run as root run under an account that may enter their folder.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { chmodSync, cpSync, mkdirSync, mkdtempSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { account, closedFolder } from '../scripts/programs.mjs'
import { KINDS } from './stores.mjs'

const run = promisify(execFile)

test(
  'a fetched server is on the PATH of the tests',
  { skip: process.platform === 'win32' && 'no shell' },
  async (t) => {
    const folder = mkdtempSync(join(tmpdir(), 'holdfast-servers-'))
    t.after(() => rmSync(folder, { recursive: true, force: true }))
    cpSync(fileURLToPath(new URL('../scripts', import.meta.url)), join(folder, 'scripts'), { recursive: true })
    const own = join(folder, '.servers', 'redis-server')
    for (const part of ['bin', 'lib']) mkdirSync(join(own, part), { recursive: true })
    writeFileSync(join(own, 'bin', 'redis-server'), '#!/bin/sh\necho "$LD_LIBRARY_PATH" "$@"\n', { mode: 0o755 })
    // No server is started for a variable that is set.
    const urls = Object.values(KINDS).flatMap((kind) =>
      'server' in kind ? [[kind.server, 'redis://nowhere.invalid']] : [],
    )
    const env = { ...process.env, ...Object.fromEntries(urls), PATH: '', LD_LIBRARY_PATH: '/of/the/caller' }
    const servers = join(folder, 'scripts', 'servers.mjs')
    // Twice: the first run writes the script that sets the folder of the libraries.
    for (const port of ['1', '2']) {
      const { stdout } = await run(process.execPath, [servers, 'run', '--', 'redis-server', '--port', port], { env })
      assert.equal(stdout, `${join(own, 'lib')}:/of/the/caller --port ${port}\n`)
    }
  },
)

/** Creates a program in a folder that only its owner may enter. Returns the paths of both. */
function closedProgram(t) {
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-servers-'))
  t.after(() => rmSync(folder, { recursive: true, force: true }))
  const program = join(folder, 'server')
  writeFileSync(program, '#!/bin/sh\n', { mode: 0o755 })
  chmodSync(folder, 0o700)
  return { folder, program }
}

test(
  'a folder that a user may not enter is found',
  { skip: process.platform === 'win32' && 'no permissions of folders' },
  async (t) => {
    const { folder, program } = closedProgram(t)
    const { uid, gid } = statSync(folder)
    const owner = { uid, gid }
    const member = { uid: uid + 1, gid }
    const other = { uid: uid + 1, gid: gid + 1 }
    for (const { mode, closedFor, openFor } of [
      { mode: 0o700, closedFor: [member, other], openFor: [owner] },
      { mode: 0o710, closedFor: [other], openFor: [owner, member] },
      { mode: 0o711, closedFor: [], openFor: [owner, member, other] },
    ]) {
      chmodSync(folder, mode)
      for (const user of closedFor) assert.equal(await closedFolder(program, user), folder)
      // The folder of the temporary files may be closed, too.
      for (const user of openFor) assert.notEqual(await closedFolder(program, user), folder)
    }
  },
)

test(
  'a server in a folder that its account may not enter is refused with a clear error',
  { skip: process.getuid?.() !== 0 && 'not root' },
  async (t) => {
    const { folder, program } = closedProgram(t)
    const message = `${folder} is closed to other users, and server does not run as root: chmod 711 ${folder}`
    await assert.rejects(account('postgres', program), { message })
  },
)
