// bench/elections.mjs: how it reads the log of a trial, and a smoke test with every contender.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { before, describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { CONTENDERS, missing } from '../bench/elections/contenders.mjs'
import { outcomeOf } from '../bench/elections/step-log.mjs'
import { TICKERS } from '../bench/elections/ticks.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))
const bench = (...args) => promisify(execFile)(process.execPath, ['bench/elections.mjs', ...args], { cwd: root })

describe('the outcome of a trial', () => {
  /** Returns the events of a job from `begin` to `last`, with a step every 10 ms. */
  const job = (pid, begin, last, what = 'step') => {
    const steps = Array.from({ length: (last - begin) / 10 }, (_, i) => ({ what: 'step', at: begin + 10 * i }))
    return [{ what: 'begin', at: begin }, ...steps, { what, at: last }].map((event) => ({
      id: `${pid}`,
      pid,
      ...event,
    }))
  }
  const outcome = (events, leader = { pid: 1, begin: 0 }) =>
    outcomeOf(
      events.sort((one, other) => one.at - other.at),
      { leader, from: 1000, to: 9000 },
    )

  test('a leader that is killed: the time to the next one', () => {
    const { nextMs, isKept, idleMs, lateSteps } = outcome([...job(1, 0, 1000), ...job(2, 6000, 9000)])
    assert.deepEqual([nextMs, isKept, idleMs, lateSteps], [5000, false, 5000, 0])
  })

  test('a leader that resigns: the time from the end of its job', () => {
    const { nextMs, lateSteps } = outcome([...job(1, 0, 1010, 'end'), ...job(2, 1012, 9000)])
    assert.deepEqual([nextMs, lateSteps], [2, 0])
  })

  test('a leader that stays', () => {
    const { nextMs, isKept } = outcome([...job(1, 0, 9000)])
    assert.deepEqual([nextMs, isKept], [undefined, true])
  })

  test('a former leader that works beside the next one, for a step, for a time, and until the end', () => {
    const next = job(2, 6000, 9000)
    const late = (...more) =>
      outcome([...job(1, 0, 1000), ...next, ...more.map((at) => ({ id: '1', pid: 1, what: 'step', at }))])
    assert.deepEqual(
      [late(8001)].map(({ lateSteps, lateMs, isLateAtEnd }) => [lateSteps, lateMs, isLateAtEnd]),
      [[1, 10, false]],
    )
    assert.deepEqual(
      [late(7000, 7200)].map(({ lateMs, isLateAtEnd }) => [lateMs, isLateAtEnd]),
      [[210, false]],
    )
    assert.equal(late(7000, 8900).isLateAtEnd, true)
    // Before the next one began.
    assert.equal(late(5000).lateSteps, 0)
  })
})

describe('node bench/elections.mjs --quick', () => {
  let sections
  before(
    async () => {
      const { stdout } = await bench('--quick')
      sections = Object.fromEntries(stdout.split(/^## /m).map((part) => [part.split('\n', 1)[0], part]))
    },
    { timeout: 300_000 },
  )

  /** Returns the cells of a contender's row. */
  const cellsOf = (title, name) => {
    const row = sections[title].split('\n').find((line) => line.startsWith(`| ${name} |`))
    return (row ?? assert.fail(`${title} has no row ${name}`)).split('|').map((cell) => cell.trim())
  }

  for (const [name, { store }] of Object.entries(CONTENDERS)) {
    test(`a leader that resigns or is killed is replaced: ${name}`, { skip: missing(store) }, () => {
      for (const title of ['The leader resigns', 'The leader is killed']) {
        const [, , next, kept, idle, late] = cellsOf(title, name)
        assert.match(next, /^\d[\d.]* m?s$/, title)
        assert.match(idle, /^\d[\d.]* m?s$/, title)
        assert.equal(kept, '0 of 1', title)
        if (name.startsWith('holdfast')) assert.equal(late, 'never', title)
      }
    })
  }

  for (const [name, { store }] of Object.entries(TICKERS)) {
    test(`the ticks are counted: ${name}`, { skip: missing(store) }, () => {
      const [, , , ...counts] = cellsOf('A job once per tick', name).slice(0, -1)
      const numbers = counts.map((text) => /^(\d+) of 2$/.exec(text)?.[1] ?? assert.fail(text)).map(Number)
      assert.equal(numbers[0] + numbers[1] + numbers[2], 2)
      if (/once/i.test(name)) assert.equal(numbers[0], 2, counts.join())
    })
  }
})

describe('the arguments', () => {
  test('rejects an unknown fault', async () => {
    const failure = await bench('--faults', 'floods').catch((error) => error)
    assert.equal(failure.code, 1)
    assert.match(failure.stderr, /--faults floods: one of resigns; killed; .*; ticks/)
  })
})
