// The benchmark works for every contender. How fast they are is no test's business.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const root = fileURLToPath(new URL('..', import.meta.url))
const REDIS = { contenders: ['holdfast', 'ioredis', 'redlock', 'redis-semaphore'], loads: [1, 64, 1024] }
const MONGODB = { contenders: ['holdfast', 'gist', 'mongodb-lock', 'now-upsert'], loads: [1, 64, 256] }
const FIELDS = [
  { title: /^Redis /, ...REDIS },
  { title: /^MongoDB .* \(standalone\)/, ...MONGODB },
  { title: /^MongoDB .* \(replica set with 1 member, majority\)/, ...MONGODB },
]

/** The rows of a part of a report that are about contenders, as lists of cells. */
const rowsOf = (part) => part.split('\n').filter((line) => /^\| [a-z]/.test(line)).map((line) => line.split('|').map((cell) => cell.trim()))

test('npm run bench -- --quick measures every contender at every load', { timeout: 300_000 }, async () => {
  const { stdout } = await promisify(execFile)(process.execPath, ['bench/run.mjs', '--quick'], { cwd: root })
  const sections = stdout.split(/^## /m).slice(1)
  assert.equal(sections.length, FIELDS.length)
  for (const [index, { title, contenders, loads }] of FIELDS.entries()) {
    assert.match(sections[index], title)
    const parts = sections[index].split(/^### /m).slice(1)
    assert.deepEqual(parts.map((part) => part.split('\n', 1)[0]), loads.map((load) => `${load} in flight`))
    for (const part of parts) {
      const rows = rowsOf(part)
      assert.deepEqual(rows.map(([, name]) => name), contenders)
      for (const [, name, ...cells] of rows) {
        for (const cell of cells.slice(0, 6)) assert.ok(parseFloat(cell) > 0, `${name}: ${cell}`)
      }
    }
  }
})

test('npm run bench:leases -- --quick measures what held leases cost', { timeout: 120_000 }, async () => {
  const { stdout } = await promisify(execFile)(process.execPath, ['bench/leases.mjs', '--quick'], { cwd: root })
  const rows = rowsOf(stdout)
  assert.deepEqual(rows.map(([, name]) => name), ['holdfast', 'redlock', 'redis-semaphore'])
  for (const [, name, , ...cells] of rows) {
    const [, , cpu, requests, commands, bytes, , lost] = cells.map(parseFloat)
    // The growth of so few leases is noise.
    for (const figure of [cpu, requests, commands, bytes]) assert.ok(figure > 0, `${name}: ${cells}`)
    assert.equal(lost, 0, name)
  }
})

for (const [script, contenders] of [
  ['handoff', ['holdfast', 'redlock', 'redis-semaphore', 'verrou']],
  ['handoff-mongodb', ['holdfast', 'gist', 'mongodb-lock', 'locco']],
]) {
  test(`npm run bench:${script} -- --quick measures the hand-offs of every contender`, { timeout: 180_000 }, async () => {
    const { stdout } = await promisify(execFile)(process.execPath, [`bench/${script}.mjs`, '--quick'], { cwd: root })
    const sections = stdout.split(/^## /m).slice(1)
    const titles = ['1 waiter', '100 waiters in 4 processes', '100 waiters in 4 processes that wait for 0.5 s']
    assert.deepEqual(sections.map((section) => section.split('\n', 1)[0]), titles)
    for (const [index, section] of sections.entries()) {
      const rows = rowsOf(section)
      assert.deepEqual([...new Set(rows.map(([, name]) => name))], contenders)
      for (const [, name, , ...cells] of rows) {
        // Who waits without asking sends nothing.
        for (const cell of cells.slice(0, -1)) assert.ok(parseFloat(cell) > 0 || (index === 2 && name === 'holdfast'), `${name}: ${cells}`)
      }
    }
  })
}
