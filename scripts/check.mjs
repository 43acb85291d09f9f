// `npm run check`, which CI runs: format, lints, types, layers, structure, words, docs, generated files, the package, and then every test.
//
//   node scripts/check.mjs --fast     Without the package, the docs of Rust, and the stores that need more than Redis: some minutes.
//   node scripts/check.mjs --stores   Only the lints of each store alone.
import { readFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import { checkLines } from './code-lines.mjs'
import { locateEtcd } from './etcd.mjs'
import { checkFiles } from './files.mjs'
import { checkLayers, checkSurface } from './layers.mjs'
import { hostTarget } from './pgo.mjs'
import { featuresOf, STORES } from './rust-tests.mjs'
import { locateMariadb, locateMysql, locatePgBouncer, locatePostgres } from './sql-binaries.mjs'
import { locateMongod, locateRedis } from './servers.mjs'
import { commandOf, installDependencies } from './setup.mjs'
import { printSteps, run, step } from './steps.mjs'
import { checkMutants, checkStructure } from './structure.mjs'
import { test } from './test.mjs'
import { checkWords } from './words.mjs'
import { locateZookeeper } from './zookeeper.mjs'

process.chdir(fileURLToPath(new URL('..', import.meta.url)))
// Files that the build writes, and that are committed: `dist/` is not.
const GENERATED = ['index.d.ts', 'testing.d.ts', 'otel.d.ts', 'docs/api.md', 'lib/addon.d.ts']

/** @param {string} command @param {string[]} args @param {Record<string, string>} [env] */
async function must(command, args, env) {
  const { code } = await run(command, args, env)
  if (code !== 0) throw new Error(`${command} ${args.join(' ')} ended with ${code}`)
}

/**
 * Runs a command of a development dependency.
 *
 * @param {string} path
 * @param {string[]} args
 */
const tool = (path, ...args) => must(process.execPath, [path, ...args])

/** @param {string[]} problems */
function mustBeEmpty(problems) {
  if (problems.length > 0) throw new Error(problems.join('\n'))
}

const isFast = process.argv.includes('--fast')

// With the addon's target, so that lints and builds share the output of build scripts, above all SQLite.
/** @param {string} features */
const clippy = (features) => {
  const selected = ['--all-targets', '--no-default-features', '--features', features]
  return must('cargo', ['clippy', '--quiet', '--target', hostTarget, ...selected, '--', '-D', 'warnings'])
}

if (process.argv.includes('--stores')) {
  // The library and its tests with one store. Without the memory store the service's tests are omitted.
  for (const store of STORES) await step(`lints, ${store} alone`, () => clippy(store))
  printSteps()
  process.exit()
}
installDependencies()
// The type check reads the packages that the benchmarks import.
installDependencies('bench')
// Downloads run at the same time as cargo. The tests report a missing server.
const others = [locateMongod, locatePostgres, locatePgBouncer, locateMariadb, locateMysql, locateEtcd, locateZookeeper]
const fetching = Promise.allSettled([locateRedis, ...(isFast ? [] : others)].map((locate) => locate()))
await step('format', async () => {
  await must('cargo', ['fmt', '--check'])
  await tool(commandOf('prettier'), '--check', '--log-level', 'warn', '.')
})
await step('JavaScript: lints and types', async () => {
  await tool(commandOf('oxlint'), '--deny-warnings', '.')
  for (const project of ['tsconfig.check.json', 'tsconfig.scripts.json'])
    await tool(commandOf('typescript', 'tsc'), '-p', project)
})
await step('layers', () => mustBeEmpty([...checkLayers('src'), ...checkSurface('lib')]))
await step('structure', () => mustBeEmpty([...checkStructure('src'), ...checkMutants('.')]))
await step('code lines', () => mustBeEmpty(checkLines()))
await step('words', () => mustBeEmpty(checkWords()))
await step('file sizes, registry hosts and local paths', () => mustBeEmpty(checkFiles()))
await step('generated files are up to date', async () => {
  const before = GENERATED.map((file) => readFileSync(file, 'utf8'))
  await must(process.execPath, ['scripts/build.mjs'])
  mustBeEmpty(
    GENERATED.filter((file, i) => readFileSync(file, 'utf8') !== before[i]).map(
      (file) => `${file} differs from the output of the build`,
    ),
  )
})

if (!isFast) {
  await step('package', async () => {
    await tool(commandOf('publint'), '--strict')
    const entries = ['--pack', '.', '--entrypoints', '.', './testing']
    await tool(commandOf('@arethetypeswrong/cli', 'attw'), ...entries, '--no-definitely-typed')
  })
  await step('documentation', () =>
    must('cargo', ['doc', '--quiet', '--no-deps', '--document-private-items', '--target', hostTarget], {
      RUSTDOCFLAGS: '-D warnings',
    }),
  )
}
await step('lints, all stores', () => clippy(featuresOf(STORES)))
await step('fetch of the servers', () => fetching)

// Last, so that the count is the last line of the output.
if ((await test({ build: false, stores: isFast ? ['memory', 'redis'] : STORES })) > 0) process.exitCode = 1
