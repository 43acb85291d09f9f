// Runs the Node tests with `node:test`, several files at a time, and counts them.
import { readdirSync } from 'node:fs'
import { basename, join } from 'node:path'
import { run } from 'node:test'
import { spec } from 'node:test/reporters'
import { fileURLToPath } from 'node:url'
import { inspect } from 'node:util'
import { STORES } from './rust-tests.mjs'
import { step } from './steps.mjs'

const folder = fileURLToPath(new URL('../__test__', import.meta.url))
const LONGEST_SHOWN = 12
/** Specs that keep a core busy: they would delay the others, and run one at a time after them. */
const BUSY = /^(.*bursts?|bursts-.*|.*-stall|silent-connections|mongodb-rolling-deployment)\.spec\.mjs$/
/** Specs that run for a minute or more: they start first, so that none of them runs alone at the end. */
const LONG = [
  'processes',
  'mongodb-failover-load',
  'mongodb-failover',
  'lost-replies',
  'mongodb-security',
  'postgres-faults',
  'mysql-faults',
  'postgres-failover',
  'postgres-pooler',
  'redis-sentinel',
  'mongodb-permissions',
  'outage',
  'etcd-faults',
  'zookeeper-faults',
  'etcd-failover',
  'zookeeper-failover',
]
/** The other specs wait most of the time: four of them leave some time of two cores. */
const CONCURRENCY = 4
/** A process that does not end within this time is a failure. */
const TIMEOUT_MS = 600_000

/**
 * Runs `files` in the given order, `concurrency` of them at a time. The environment is that of this process.
 *
 * Resolves to `passed`, `failed`, `skipped` (a line for each), `failures` (a text for each, with the error), and `seconds`: the
 * duration of each file.
 *
 * @param {string[]} files
 * @param {number} concurrency
 */
export async function runTests(files, concurrency) {
  /** @type {{ passed: number, failed: number, skipped: string[], failures: string[], seconds: Map<string, number> }} */
  const results = { passed: 0, failed: 0, skipped: [], failures: [], seconds: new Map() }
  let failedSuites = 0
  /** @type {{ nesting: number, text: string }[]} */
  const failed = []
  /** @param {any} data @param {boolean} isGood */
  const ended = ({ name, file, nesting, skip, todo, details }, isGood) => {
    if (!isGood && details.error?.failureType !== 'subtestsFailed')
      failed.push({ nesting, text: `${name}\n${inspect(details.error?.cause ?? details.error)}` })
    // A suite is reported after its tests. Its name has the store, which the file does not.
    else if (!isGood)
      for (const test of failed.filter((test) => test.nesting > nesting)) {
        test.text = `${name}: ${test.text}`
        test.nesting = nesting
      }
    if (nesting === 0) results.failures.push(...failed.splice(0).map(({ text }) => `${basename(file ?? '')}: ${text}`))
    if (details.type === 'suite') {
      if (!isGood) failedSuites++
    } else if (!isGood) results.failed++
    else if (skip !== undefined) results.skipped.push(`${name}: ${typeof skip === 'string' ? skip : ''}`)
    else if (todo === undefined) results.passed++
  }
  const tests = run({ files, concurrency, timeout: TIMEOUT_MS })
  tests.on('test:complete', ({ name, nesting, details }) => {
    if (nesting === 0 && files.includes(name)) results.seconds.set(name, details.duration_ms / 1000)
  })
  tests.on('test:pass', (data) => ended(data, true)).on('test:fail', (data) => ended(data, false))
  for await (const text of tests.compose(new spec())) process.stdout.write(text)
  // A failed hook is not counted as a test.
  if (results.failed === 0 && failedSuites > 0) results.failed = failedSuites
  return results
}

/** Runs all specs; with fewer stores than all, those that have the name of one. Resolves to the counts of each part. */
export async function nodeTests(stores = STORES) {
  const isOfStore = (/** @type {string} */ name) => stores === STORES || stores.includes(name.replace('.spec.mjs', ''))
  const specs = readdirSync(folder).filter((name) => name.endsWith('.spec.mjs') && isOfStore(name))
  // Specs that are not listed have the largest rank.
  /** @param {string} name */
  const rank = (name) => LONG.indexOf(name.replace('.spec.mjs', '')) >>> 0
  const calm = specs.filter((name) => !BUSY.test(name)).sort((one, other) => rank(one) - rank(other))
  /** @param {string[]} names */
  const paths = (names) => names.map((name) => join(folder, name))
  const parts = [
    await step('Node tests', () => runTests(paths(calm), CONCURRENCY)),
    await step('Node tests that keep a core busy', () => runTests(paths(specs.filter((name) => BUSY.test(name))), 1)),
  ]
  const seconds = parts.flatMap((part) => [...part.seconds]).sort((one, other) => other[1] - one[1])
  console.log('\nThe longest specs:')
  for (const [file, took] of seconds.slice(0, LONGEST_SHOWN))
    console.log(`${took.toFixed(1).padStart(9)} s  ${basename(file)}`)
  return parts
}
