// The schedulers of docs/recipes/cron.md, each in three processes whose clocks differ: the job is done once per tick.
import assert from 'node:assert/strict'
import { fork } from 'node:child_process'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, test } from 'node:test'
import { fileURLToPath, pathToFileURL } from 'node:url'
import { blocksOf } from './readme/blocks.mjs'
import { Project } from './readme/run.mjs'
import { sleep, until } from './tools.mjs'

const CHILD = fileURLToPath(new URL('children/cron.mjs', import.meta.url))
const TICK_MS = 6000
const TICKS = 3
const MOST_TICKS = 8
/** The calls of a tick come within this time before and after it. */
const MARGIN_MS = 1500
/** A machine that stands still for longer moves the calls of the instances apart. */
const LONGEST_STALL_MS = 250
/** The first one calls first. */
const SKEWS = [400, 0, -300]
const recipes = blocksOf('docs/recipes/cron.md').filter(({ check }) => check === 'types')

let project
let folder
before(() => {
  project = new Project()
  project.alsoHas('.', 'node-cron', 'croner', '@nestjs/common', '@nestjs/core', '@nestjs/schedule')
  folder = mkdtempSync(join(tmpdir(), 'holdfast-cron-'))
})
after(() => {
  project?.close()
  if (folder) rmSync(folder, { recursive: true, maxRetries: 20, retryDelay: 50 })
})

/** Waits until `end`. Resolves to whether this process, and so most of the machine, ran from `start` on without a long stall. */
async function runs(start, end) {
  await sleep(Math.max(0, start - Date.now()))
  for (let last = start; ;) {
    const now = Date.now()
    if (now - last > LONGEST_STALL_MS) {
      await sleep(Math.max(0, end - now))
      return false
    }
    if (now >= end) return true
    last = now
    await sleep(20)
  }
}

/**
 * Runs a recipe every 6 s. Resolves to what the instances report for each of some ticks in which all of them run: at least three, some of
 * them with a failure and some without one. Ticks at which the machine stands still are left out.
 */
async function ticksOf(t, recipe, name) {
  const code = recipe.code.replace("'0 * * * *'", "'*/6 * * * * *'").replace("'50m'", "'4000ms'")
  assert.match(code, /6 \*[^]*4000ms/)
  const [{ errors, file }] = await project.compile([code])
  assert.deepEqual(errors, [])
  const task = { file: pathToFileURL(file).href, url: `sqlite:${join(folder, name)}` }
  const reports = /** @type {{ type: string, at: number, skewMs: number }[]} */ ([])
  let output = ''
  for (const skewMs of SKEWS) {
    const own = JSON.stringify({ ...task, skewMs, fails: skewMs === SKEWS[0] })
    const child = fork(CHILD, [own], { stdio: ['ignore', 'pipe', 'pipe', 'ipc'] })
    t.after(() => child.kill('SIGKILL'))
    child.on('message', (message) => reports.push({ .../** @type {any} */ (message), skewMs }))
    for (const stream of [child.stdout, child.stderr]) stream?.on('data', (data) => (output += data))
    child.on('exit', (code) => (output += `exit ${code}`))
  }
  const of = (type) => reports.filter((report) => report.type === type)
  await until(`the instances: ${output}`, () => of('ready').length === SKEWS.length, 60_000)
  // No instance has missed a part of this tick.
  const first = Math.ceil((Date.now() + MARGIN_MS + LONGEST_STALL_MS) / TICK_MS)
  const ticks = []
  const fails = (tick) => tick.some(({ type }) => type === 'failure')
  const isEnough = () => ticks.length >= TICKS && ticks.some(fails) && !ticks.every(fails)
  for (let tick = first; tick < first + MOST_TICKS && !isEnough(); tick++) {
    const at = tick * TICK_MS
    if (await runs(at - MARGIN_MS, at + MARGIN_MS)) {
      ticks.push(reports.filter((report) => Math.round(report.at / TICK_MS) === tick))
    }
  }
  assert.ok(ticks.length >= TICKS, `the machine stood still at most ticks: ${output}`)
  return ticks
}

describe('a job in three instances', { concurrency: true }, () => {
  for (const recipe of recipes) {
    const [, scheduler = ''] = /from '([^']*(?:cron|schedule)[^']*)'/.exec(recipe.code) ?? []
    test(`${scheduler} does it once per tick, and in another instance when it throws`, async (t) => {
      const ticks = await ticksOf(t, recipe, scheduler.replace(/\W/g, ''))
      const count = (reports, type) => reports.filter((report) => report.type === type).length
      const shown = JSON.stringify(ticks)
      for (const reports of ticks) {
        assert.equal(count(reports, 'call'), SKEWS.length, shown)
        assert.equal(count(reports, 'success'), 1, shown)
        const failed = reports.findIndex(({ type }) => type === 'failure')
        if (failed < 0) continue
        const success = reports.find(({ type }) => type === 'success')
        assert.notEqual(success?.skewMs, reports[failed].skewMs, shown)
      }
      // The instance whose clock is ahead fails in every second run.
      assert.ok(
        ticks.some((reports) => count(reports, 'failure') === 1),
        shown,
      )
      assert.ok(
        ticks.some((reports) => count(reports, 'failure') === 0),
        shown,
      )
    })
  }

  test('there is a recipe for each scheduler', () => assert.equal(recipes.length, 3))
})
