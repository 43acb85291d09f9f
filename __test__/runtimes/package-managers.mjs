// Package managers with a strict layout: holdfast finds the addon only by its own optional dependency. `package.spec.mjs` tests npm.
import { cpSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { pack } from '../consumers/installed.mjs'
import { ENTRY, RUNTIMES, toolsOf } from '../consumers/tools.mjs'

const { mustWork, packaged, run, runPackaged } = toolsOf(RUNTIMES)

/**
 * Writes an app that depends on holdfast alone. `more` takes the tarballs and returns more fields of its package.json.
 *
 * @param {string} temp
 * @param {(files: Record<string, string>) => object} more
 */
async function app(temp, more) {
  const { holdfast, ...platform } = await pack(temp)
  const files = Object.fromEntries(Object.entries(platform).map(([name, file]) => [name, `file:${file}`]))
  const manifest = { private: true, dependencies: { holdfast: `file:${holdfast}` }, ...more(files) }
  const folder = join(temp, 'app')
  cpSync(ENTRY, join(folder, 'bundle.cjs'))
  writeFileSync(join(folder, 'package.json'), JSON.stringify(manifest))
  return { folder, files }
}

/** @type {import('../consumers/tools.mjs').Case[]} */
export const packageManagers = [
  {
    name: 'pnpm',
    of: 'pnpm',
    async run({ temp }) {
      const { folder, files } = await app(temp, () => ({}))
      writeFileSync(join(folder, 'pnpm-workspace.yaml'), JSON.stringify({ overrides: files }))
      const args = ['install', '--store-dir', join(temp, 'store'), '--offline', '--config.node-linker=isolated']
      await runPackaged('pnpm', 'bin/pnpm.cjs', args, { cwd: folder })
      await mustWork(process.execPath, ['bundle.cjs'], { cwd: folder })
    },
  },
  {
    name: "Yarn, Plug'n'Play",
    of: '@yarnpkg/cli-dist',
    async run({ temp }) {
      const yarn = packaged('@yarnpkg/cli-dist', 'bin/yarn.js')
      const { folder } = await app(temp, (files) => ({ resolutions: files }))
      writeFileSync(join(folder, 'yarn.lock'), '')
      const env = {
        YARN_NODE_LINKER: 'pnp',
        YARN_ENABLE_IMMUTABLE_INSTALLS: 'false',
        YARN_ENABLE_TELEMETRY: 'false',
        YARN_ENABLE_GLOBAL_CACHE: 'false',
        YARN_GLOBAL_FOLDER: join(temp, 'yarn'),
      }
      await run(process.execPath, [yarn, 'install'], { cwd: folder, env })
      await mustWork(process.execPath, [yarn, 'node', 'bundle.cjs'], { cwd: folder, env })
    },
  },
]
