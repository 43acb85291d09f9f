// Bundlers, and test runners, whose tests have globals of their own. `consumers.spec.mjs` and `npm run check:runtimes` run these cases.
// The bundle of `bundle.cjs` runs in a folder without packages, so it must contain the addon.
import { rmSync } from 'node:fs'
import { createRequire } from 'node:module'
import { dirname, join } from 'node:path'
import { promisify } from 'node:util'
import { install } from './installed.mjs'
import { CONSUMERS, ENTRY, messages, mustBeEmpty, toolsOf } from './tools.mjs'

/** @import { Case } from './tools.mjs' */

const { mustWork, packaged, runPackaged } = toolsOf(CONSUMERS)
const require = createRequire(join(CONSUMERS, 'package.json'))

/** @param {string} file */
const node = (file) => mustWork(process.execPath, [file], { cwd: dirname(file) })

/** @type {Case[]} */
const bundlers = [
  {
    name: 'esbuild',
    of: 'esbuild',
    async run({ temp }) {
      packaged('esbuild')
      const { errors, warnings } = await require('esbuild').build({
        entryPoints: [ENTRY],
        bundle: true,
        platform: 'node',
        loader: { '.node': 'copy' },
        outdir: temp,
        logLevel: 'silent',
      })
      mustBeEmpty('warnings', messages([...errors, ...warnings]))
      await node(join(temp, 'bundle.js'))
    },
  },
  {
    name: 'webpack, with node-loader',
    of: 'webpack',
    async run({ temp }) {
      packaged('webpack')
      const stats = await promisify(require('webpack'))({
        mode: 'production',
        target: 'node',
        context: CONSUMERS,
        entry: ENTRY,
        output: { path: temp, filename: 'bundle.js' },
        optimization: { minimize: false },
        module: { rules: [{ test: /\.node$/, loader: 'node-loader' }] },
      })
      const { errors, warnings } = stats.toJson({ all: false, errors: true, warnings: true })
      mustBeEmpty('warnings', messages([...errors, ...warnings]))
      await node(join(temp, 'bundle.js'))
    },
  },
  {
    name: 'rollup, with the addon external',
    of: 'rollup',
    async run({ temp }) {
      packaged('rollup')
      /** @type {string[]} */
      const warnings = []
      const bundle = await require('rollup').rollup({
        input: ENTRY,
        external: (/** @type {string} */ id) => id.endsWith('.node'),
        plugins: [
          require('@rollup/plugin-node-resolve').default({ preferBuiltins: true }),
          require('@rollup/plugin-commonjs')(),
        ],
        onwarn: (/** @type {{ message: string }} */ { message }) => warnings.push(message),
      })
      const file = join(temp, 'bundle.cjs')
      await bundle.write({ file, format: 'cjs' })
      await bundle.close()
      mustBeEmpty('warnings', warnings)
      // The bundle loads the addon from the package of its platform, which must be installed beside it.
      install(join(temp, 'node_modules'))
      rmSync(join(temp, 'node_modules', 'holdfast'), { recursive: true })
      await node(file)
    },
  },
]

/** @param {string} pool @returns {Case} */
const vitest = (pool) => ({
  name: `Vitest, ${pool}`,
  of: 'vitest',
  run: () =>
    runPackaged('vitest', 'vitest.mjs', ['run', '--root', CONSUMERS, '--pool', pool, 'vitest.test.mjs']).then(() => {}),
})

/** @type {Case[]} */
const testRunners = [
  {
    name: 'Jest',
    of: 'jest',
    run: () =>
      runPackaged('jest', 'bin/jest.js', ['--rootDir', CONSUMERS, '--testMatch', '**/jest.test.js']).then(() => {}),
  },
  ...['forks', 'threads', 'vmThreads', 'vmForks'].map(vitest),
]

export const consumers = [...bundlers, ...testRunners]
