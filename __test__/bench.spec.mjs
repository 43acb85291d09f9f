// The benchmark works for every contender. How fast they are is no test's business.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const root = fileURLToPath(new URL('..', import.meta.url))
const CONTENDERS = { Redis: ['holdfast', 'ioredis', 'redlock', 'redis-semaphore'], MongoDB: ['holdfast', 'gist'] }

test('npm run bench -- --quick measures every contender at every load', { timeout: 300_000 }, async () => {
  const { stdout } = await promisify(execFile)(process.execPath, ['bench/run.mjs', '--quick'], { cwd: root })
  const sections = stdout.split(/^## /m).slice(1)
  assert.equal(sections.length, 2)
  for (const section of sections) {
    const contenders = CONTENDERS[section.split(' ', 1)[0]]
    const loads = section.split(/^### /m).slice(1)
    assert.deepEqual(loads.map((load) => load.split('\n', 1)[0]), ['1 in flight', '64 in flight', '1024 in flight'])
    for (const load of loads) {
      const rows = load.split('\n').filter((line) => /^\| [a-z]/.test(line)).map((line) => line.split('|').map((cell) => cell.trim()))
      assert.deepEqual(rows.map(([, name]) => name), contenders)
      for (const [, name, ...cells] of rows) {
        for (const cell of cells.slice(0, 6)) assert.ok(parseFloat(cell) > 0, `${name}: ${cell}`)
      }
    }
  }
})

test('npm run bench:leases -- --quick measures what held leases cost', { timeout: 120_000 }, async () => {
  const { stdout } = await promisify(execFile)(process.execPath, ['bench/leases.mjs', '--quick'], { cwd: root })
  const rows = stdout.split('\n').filter((line) => /^\| [a-z]/.test(line)).map((line) => line.split('|').map((cell) => cell.trim()))
  assert.deepEqual(rows.map(([, name]) => name), ['holdfast', 'redlock', 'redis-semaphore'])
  for (const [, name, , ...cells] of rows) {
    const [, , cpu, requests, commands, bytes, , lost] = cells.map(parseFloat)
    // The growth of so few leases is noise.
    for (const figure of [cpu, requests, commands, bytes]) assert.ok(figure > 0, `${name}: ${cells}`)
    assert.equal(lost, 0, name)
  }
})

test('npm run bench:handoff -- --quick measures the hand-offs of every contender', { timeout: 180_000 }, async () => {
  const { stdout } = await promisify(execFile)(process.execPath, ['bench/handoff.mjs', '--quick'], { cwd: root })
  const sections = stdout.split(/^## /m).slice(1)
  const titles = ['1 waiter', '100 waiters in 4 processes', '100 waiters in 4 processes that wait for 0.5 s']
  assert.deepEqual(sections.map((section) => section.split('\n', 1)[0]), titles)
  for (const [index, section] of sections.entries()) {
    const rows = section.split('\n').filter((line) => /^\| [a-z]/.test(line)).map((line) => line.split('|').map((cell) => cell.trim()))
    assert.deepEqual([...new Set(rows.map(([, name]) => name))], ['holdfast', 'redlock', 'redis-semaphore', 'verrou'])
    for (const [, name, , ...cells] of rows) {
      // Who waits without asking sends nothing.
      for (const cell of cells.slice(0, -1)) assert.ok(parseFloat(cell) > 0 || (index === 2 && name === 'holdfast'), `${name}: ${cells}`)
    }
  }
})
