// The servers of the tests: Rust's tests start a fetched `redis-server` by its name, with the libraries that were fetched with it.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { cpSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
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
