// `npm run check`: format, lints, layers, docs, generated files in step, and then every test. What CI runs.
import { readdirSync, readFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import { execFileSync } from 'node:child_process'
import { checkLayers, checkSurface } from './layers.mjs'
import { hostTarget } from './pgo.mjs'
import { locateMongod, locateRedis } from './servers.mjs'
import { installDependencies } from './setup.mjs'
import { step } from './steps.mjs'
import { run, test } from './test.mjs'

process.chdir(fileURLToPath(new URL('..', import.meta.url)))
const STORES = ['memory', 'sqlite', 'redis', 'mongodb']
const GENERATED = ['index.d.ts', 'lib/addon.d.ts', ...readdirSync('dist', { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile()).map((entry) => `${entry.parentPath}/${entry.name}`)]
/** A file that a person wrote is better split when it is longer than the one, and must be when it is longer than the other. */
const [MANY_LINES, MOST_LINES] = [300, 500]

async function must(command, args, env) {
  const { code } = await run(command, args, env)
  if (code !== 0) throw new Error(`${command} ${args.join(' ')} ended with ${code}`)
}

function mustBeEmpty(problems) {
  if (problems.length > 0) throw new Error(problems.join('\n'))
}

// With the addon's target, so that the lints and the builds share what build scripts compile, above all SQLite.
const clippy = (...features) => {
  const selected = ['--all-targets', '--no-default-features', '--features', features.join()]
  return must('cargo', ['clippy', '--quiet', '--target', hostTarget, ...selected, '--', '-D', 'warnings'])
}

const tracked = () =>
  execFileSync('git', ['ls-files'], { encoding: 'utf8' })
    .split('\n')
    .filter((file) => /\.(rs|lua|sql|m?js|ts|json|md|toml|ya?ml|lock)$|^\.ci\/run$|^\.npmrc$/.test(file))

installDependencies()
// Downloads run beside cargo. Where a server is missing, the tests report it.
const fetching = Promise.allSettled([locateRedis(), locateMongod()])
await step('format', () => must('cargo', ['fmt', '--check']))
await step('layers', () => mustBeEmpty([...checkLayers('src'), ...checkSurface('lib')]))
await step('sizes, and what does not belong in a commit', () => {
  const problems = []
  for (const file of tracked()) {
    const text = readFileSync(file, 'utf8')
    const lines = text.split('\n').length
    if (/(\.(rs|mjs)|^lib\/.*\.ts)$/.test(file) && lines > MANY_LINES) {
      if (lines > MOST_LINES) problems.push(`${file} has ${lines} lines, more than ${MOST_LINES}`)
      else console.log(`${file} has ${lines} lines`)
    }
    // The patterns are put together here so that this file does not match itself.
    const registry = new RegExp(['registry\\.npmjs', 'index\\.crates', 'static\\.crates', 'files\\.pythonhosted'].join('|'))
    if (registry.test(text)) problems.push(`${file} names the host of a package registry`)
    if (new RegExp('/' + '(work|root|home/\\w+|Users/\\w+)/').test(text)) problems.push(`${file} has a path of one machine`)
  }
  mustBeEmpty(problems)
})
await step('generated files are in step', async () => {
  const before = GENERATED.map((file) => readFileSync(file, 'utf8'))
  await must(process.execPath, ['scripts/build.mjs'])
  mustBeEmpty(
    GENERATED.filter((file, i) => readFileSync(file, 'utf8') !== before[i]).map((file) => `${file} was not what the build makes`),
  )
})

await step('lints, all stores', () => clippy(...STORES, 'node'))
// The library and its tests, without the other stores. Without the memory store the service's tests are left out.
for (const store of STORES) await step(`lints, ${store} alone`, () => clippy(store))
await step('documentation', () =>
  must('cargo', ['doc', '--quiet', '--no-deps', '--document-private-items', '--target', hostTarget], { RUSTDOCFLAGS: '-D warnings' }),
)
await step('fetch of the servers', () => fetching)

// Last, so that the count closes the output.
if ((await test({ build: false })) > 0) process.exitCode = 1
