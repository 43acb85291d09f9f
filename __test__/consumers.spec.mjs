// Where others load holdfast: the test runners that give each test file globals of its own, and bundlers. Their packages are in
// `consumers/`, which has a lock file of its own.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { installDependencies } from '../scripts/setup.mjs'

const run = promisify(execFile)
const root = fileURLToPath(new URL('..', import.meta.url))
const consumers = join(root, '__test__', 'consumers')
const require = createRequire(join(consumers, 'package.json'))
const addon = readdirSync(root).find((file) => file.startsWith(`holdfast.${process.platform}-${process.arch}`))
const unavailable = addon ? false : 'there is no addon of this machine'
const timeout = 120_000

let folder

before(() => {
  installDependencies('__test__/consumers', { isLenient: true })
  folder = mkdtempSync(join(tmpdir(), 'holdfast-consumers-'))
  const installed = (name) => join(folder, 'node_modules', name)
  mkdirSync(installed('holdfast'), { recursive: true })
  for (const file of ['package.json', 'index.js', 'dist'])
    cpSync(join(root, file), join(installed('holdfast'), file), { recursive: true })
  if (!addon) return
  const platform = addon.split('.')[1]
  cpSync(join(root, 'npm', platform, 'package.json'), join(installed(`holdfast-${platform}`), 'package.json'))
  cpSync(join(root, addon), join(installed(`holdfast-${platform}`), addon))
  cpSync(join(consumers, 'bundle.cjs'), join(folder, 'bundle.cjs'))
})
after(() => rmSync(folder, { recursive: true, force: true }))

/** Runs a command of a package of `consumers/`. */
function command(name, bin, ...args) {
  const file = join(consumers, 'node_modules', name, bin)
  assert.ok(existsSync(file), file)
  const env = { ...process.env, NO_COLOR: '1' }
  // A runner must not think that it runs inside Node's.
  delete env.NODE_TEST_CONTEXT
  return run(process.execPath, [file, ...args], { cwd: consumers, env, timeout }).catch((error) => {
    assert.fail(`${name}: ${error.stdout}\n${error.stderr}`)
  })
}

test('in Jest, promises and errors are of the realm of the test', { skip: unavailable }, async () => {
  await command('jest', 'bin/jest.js', '--rootDir', consumers, '--testMatch', '**/jest.test.js')
})

for (const pool of ['vmThreads', 'vmForks', 'forks']) {
  test(`in Vitest with ${pool}, promises and errors are of the realm of the test`, { skip: unavailable }, async () => {
    await command('vitest', 'vitest.mjs', 'run', '--root', consumers, '--pool', pool, 'vitest.test.mjs')
  })
}

/** Runs a bundle and gives what it printed. */
async function runBundle(file) {
  const { stdout } = await run(process.execPath, [file], { cwd: tmpdir(), timeout })
  return stdout.trim()
}

test('webpack with node-loader bundles it without a warning, and the bundle runs', { skip: unavailable }, async (t) => {
  const webpack = require('webpack')
  // Outside of the project, so that the bundle must bring the addon.
  const output = mkdtempSync(join(tmpdir(), 'holdfast-webpack-'))
  t.after(() => rmSync(output, { recursive: true, force: true }))
  const stats = await promisify(webpack)({
    mode: 'production',
    target: 'node',
    context: folder,
    entry: './bundle.cjs',
    output: { path: output, filename: 'bundle.js' },
    optimization: { minimize: false },
    resolveLoader: { modules: [join(consumers, 'node_modules')] },
    module: { rules: [{ test: /\.node$/, loader: 'node-loader' }] },
  })
  const { errors, warnings } = stats.toJson({ all: false, errors: true, warnings: true })
  assert.deepEqual(
    [...errors, ...warnings].map(({ message }) => message),
    [],
  )
  assert.ok(
    readdirSync(output).some((file) => file.endsWith('.node')),
    'the addon is in the bundle',
  )
  assert.equal(await runBundle(join(output, 'bundle.js')), 'true true')
})

test('rollup bundles it, and the bundle runs', { skip: unavailable }, async () => {
  const { rollup } = require('rollup')
  const plugins = [
    require('@rollup/plugin-node-resolve').default({ preferBuiltins: true }),
    require('@rollup/plugin-commonjs')(),
  ]
  const warnings = []
  const bundle = await rollup({
    input: join(folder, 'bundle.cjs'),
    external: (id) => id.endsWith('.node'),
    plugins,
    onwarn: ({ message }) => warnings.push(message),
  })
  const file = join(folder, 'rolled.cjs')
  await bundle.write({ file, format: 'cjs' })
  await bundle.close()
  assert.deepEqual(warnings, [])
  assert.equal(await runBundle(file), 'true true')
})
