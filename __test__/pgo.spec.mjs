// The profile for the optimised build: the workload and the tool that it needs. The builds take too long for a test.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { chmod, mkdtemp, rm, truncate, writeFile } from 'node:fs/promises'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { checkSize, isAsNew } from '../scripts/pgo.mjs'
import { startMongod, startRedis } from '../scripts/servers.mjs'
import { startRedisQuorum } from '../scripts/topologies.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))
const run = promisify(execFile)
const { LockService } = createRequire(import.meta.url)('../index.js')

test('the workload runs on every store and leaves no lock', { timeout: 120_000 }, async () => {
  const servers = await Promise.all([startRedis(), startRedisQuorum(), startMongod()])
  try {
    await run(process.execPath, ['scripts/workload.mjs', ...servers.map(({ url }) => `30:${url}`)], { cwd: root })
    for (const { url } of servers) {
      const locks = await LockService.connect(url.includes(',') ? url.split(',') : url)
      assert.deepEqual(await locks.list({ prefix: 'workload:' }), [], url)
      await locks.close()
    }
  } finally {
    await Promise.all(servers.map((server) => server.stop()))
  }
})

test('the workload rejects missing stores and durations', async () => {
  for (const args of [[], ['redis://127.0.0.1:1']]) {
    await assert.rejects(
      run(process.execPath, ['scripts/workload.mjs', ...args], { cwd: root }),
      /usage: node scripts\/workload/,
    )
  }
})

test(
  'an llvm-profdata is accepted if it is as new as the compiler',
  { skip: process.platform === 'win32' },
  async () => {
    const folder = await mkdtemp(join(tmpdir(), 'holdfast-profdata-'))
    const tool = join(folder, 'llvm-profdata')
    try {
      assert.equal(isAsNew(tool, 22), false, 'the tool is missing')
      /** @type {[string, boolean][]} */
      const versions = [
        ['LLVM version 21.1.8', false],
        ['LLVM version 22.1.2', true],
        ['Debian LLVM version 100.0.0', true],
        ['?', false],
      ]
      for (const [says, fits] of versions) {
        await writeFile(tool, `#!/bin/sh\necho '${says}'\n`)
        await chmod(tool, 0o755)
        assert.equal(isAsNew(tool, 22), fits, says)
      }
    } finally {
      await rm(folder, { recursive: true })
    }
  },
)

test('an addon that is too large is an error that has its size and the limit', async () => {
  const folder = await mkdtemp(join(tmpdir(), 'holdfast-size-'))
  const addon = join(folder, 'holdfast.node')
  try {
    await writeFile(addon, '')
    await truncate(addon, 14 * 2 ** 20)
    checkSize(addon)
    await truncate(addon, 14.5 * 2 ** 20)
    assert.throws(() => checkSize(addon), /holdfast\.node has 14\.50 MiB.* at most 14\.2 MiB/)
  } finally {
    await rm(folder, { recursive: true })
  }
})
