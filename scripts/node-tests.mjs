// Runs test files of Node, several at a time, and counts their tests.
import { run } from 'node:test'
import { spec } from 'node:test/reporters'

/** A process that does not end within this time is a failure. */
const TIMEOUT_MS = 600_000

/**
 * Runs `files` in the given order, `concurrency` of them at a time. The environment is that of this process.
 *
 * Resolves to `passed`, `failed`, `skipped` (a line for each), and `seconds`: the duration of each file.
 */
export async function runTests(files, concurrency) {
  const results = { passed: 0, failed: 0, skipped: [], seconds: new Map() }
  let failedSuites = 0
  /** @param {any} data */
  const ended = ({ name, skip, todo, details }, isGood) => {
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
