// `npm test`: installs dependencies, builds the addon, starts the servers, runs the Rust and the Node tests on every store, and
// prints a count at the end.
import { fileURLToPath, pathToFileURL } from 'node:url'
import { nodeTests } from './node-tests.mjs'
import { rustTests, STORES } from './rust-tests.mjs'
import { testServers } from './servers.mjs'
import { installDependencies, serversDir } from './setup.mjs'
import { printSteps, run, step } from './steps.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))

/**
 * Runs all tests; with fewer stores than all, the Rust tests with these stores, and the specs that have the name of one. Resolves to the
 * number of failures. The count is the last line of the output.
 */
export async function test({ build = true, stores = STORES } = {}) {
  process.chdir(root)
  // For the servers of this process and of the test processes.
  process.env.HOLDFAST_SERVERS_DIR ||= serversDir()
  installDependencies()
  // Two specs need these, and must not install them at the same time.
  installDependencies('bench')
  if (build) {
    const { code } = await step('addon', () => run(process.execPath, ['scripts/build.mjs']))
    if (code !== 0) throw new Error('the addon does not build')
  }
  // Outside of CI the tests that need a missing server are skipped.
  const servers = await step('servers', () => testServers({ optional: !process.env.CI, stores }))
  // The Rust and the Node tests are processes that inherit this environment.
  Object.assign(process.env, servers.env)
  try {
    const parts = [...(await rustTests(stores)), ...(await nodeTests(stores))]
    const results = await step('end of the tests in the background', () => Promise.all(parts))
    const skipped = results.flatMap((result) => result.skipped)
    /** @param {'passed' | 'failed'} field */
    const total = (field) => results.reduce((count, result) => count + result[field], 0)
    printSteps()
    console.log()
    // Again, because the output before is long, and of a remote run often only the end is kept.
    for (const text of results.flatMap((result) => result.failures)) console.log(`failed: ${text}\n`)
    for (const line of skipped) console.log(`skipped: ${line}`)
    console.log(`${total('passed')} passed, ${total('failed')} failed, ${skipped.length} skipped`)
    return total('failed')
  } finally {
    await servers.stop()
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  process.exitCode = (await test({ build: !process.argv.includes('--no-build') })) === 0 ? 0 : 1
}
