// Runs the Rust tests with `cargo test`, and counts them.
import { availableParallelism } from 'node:os'
import { hostTarget } from './pgo.mjs'
import { run, step } from './steps.mjs'

/** @param {string} text @param {RegExp} pattern */
const sum = (text, pattern) => [...text.matchAll(pattern)].reduce((total, [, count]) => total + Number(count), 0)

/** Omits the output of tests that pass and the second list of their names, so that failures are easy to find. */
function leaveOutSuccesses() {
  let isLeftOut = false
  return (/** @type {string} */ line) => {
    if (line === 'successes:') isLeftOut = true
    else if (line === 'failures:' || line.startsWith('test result:')) isLeftOut = false
    return !isLeftOut
  }
}

/** Tests of models keep the cores busy for minutes, which would delay the others: they run in the background. */
const MODELS = '::model::'
/** The others wait for servers and leases most of the time: five threads per core. */
const RUST_THREADS = 5 * availableParallelism()

/** The stores: each is a feature of the crate. */
export const STORES = ['memory', 'sqlite', 'redis', 'mongodb', 'postgres', 'mysql', 'etcd', 'zookeeper']
/** Returns the features of the Rust tests: the stores, and the boundary to JavaScript. @param {string[]} stores */
export const featuresOf = (stores) => (stores.length === STORES.length ? 'default' : [...stores, 'node'].join())

/**
 * Builds and runs the Rust tests of these stores. The environment is that of this process. Resolves to the counts of each part; those of the
 * models may be a promise, because they end later.
 *
 * @returns {Promise<(ReturnType<typeof rustCounts> | Promise<ReturnType<typeof rustCounts>>)[]>}
 */
export async function rustTests(stores = STORES) {
  // napi builds the addon for an explicit target, which has a separate folder: the same target here avoids a second build.
  // Without `--lib` cargo builds the library again for documentation tests, of which there are none.
  const features = ['--no-default-features', '--features', featuresOf(stores)]
  const args = ['test', '--lib', '--target', hostTarget, ...features]
  const { code: built } = await step('build of the Rust tests', () => run('cargo', [...args, '--no-run']))
  if (built !== 0) return [{ passed: 0, failed: 1, skipped: [], failures: ['the Rust tests do not build'] }]
  // With the tests' output: a test without a server passes and prints `skipped: `, which is counted below.
  /** @param {boolean} isBackground @param {string[]} selected */
  const part = async (isBackground, ...selected) => {
    const runs = [...args, '--', '--show-output', ...selected]
    return rustCounts(await run('cargo', runs, { RUST_BACKTRACE: '0' }, leaveOutSuccesses(), isBackground))
  }
  const ofModels = part(true, MODELS)
  // `Promise.all` of the caller rejects, after the others.
  ofModels.catch(() => {})
  const others = step('Rust tests', () => part(false, '--skip', MODELS, `--test-threads=${RUST_THREADS}`))
  return [await others, ofModels]
}

/** Returns the counts of a run with `--show-output`. @param {{ code: number | null, output: string }} run */
export function rustCounts({ code, output }) {
  const failed = sum(output, /^test result: .* (\d+) failed;/gm)
  const unserved = [...output.matchAll(/^---- (\S+) stdout ----\r?\nskipped: (.*)$/gm)]
  const ignored = [...output.matchAll(/^test (\S+) \.\.\. ignored(?:, )?(.*)$/gm)]
  return {
    passed: sum(output, /^test result: \w+\. (\d+) passed;/gm) - unserved.length,
    // An aborted run prints no result.
    failed: failed === 0 && code !== 0 ? 1 : failed,
    skipped: [...unserved, ...ignored].map(([, name, why]) => `${name}: ${why}`),
    // cargo prints the output of tests that failed between two such lines.
    failures: [...output.matchAll(/^failures:\r?\n\r?\n(----[^]*?)^failures:$/gm)].map(([, text]) => text.trim()),
  }
}
