// Builds the addon and `dist/` if they are missing or older than their sources, so that the demo is a single command on any machine.
import { execFileSync } from 'node:child_process'
import { readdirSync, statSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { requireRust } from '../setup.mjs'

const root = fileURLToPath(new URL('../..', import.meta.url))
const SOURCES = ['src', 'Cargo.toml', 'Cargo.lock', 'build.rs']

/**
 * Builds what is missing or outdated. Throws an error with a message of one sentence when the build fails, and ends this
 * process with a message when Rust is missing.
 *
 * @param {(text: string) => void} say
 */
export function ensureBuilt(say) {
  const why = reasonToBuild(root)
  if (!why) return
  requireRust()
  say(`${why}: building it (a debug build; the first one takes minutes)`)
  try {
    execFileSync(process.execPath, [join(root, 'scripts', 'build.mjs')], { stdio: ['ignore', 2, 2] })
  } catch (cause) {
    throw new Error('the build failed, see above', { cause })
  }
}

/**
 * Returns why the checkout in `folder` needs a build; `undefined` when it does not.
 *
 * @param {string} folder
 */
export function reasonToBuild(folder) {
  const own = `holdfast.${process.platform}-${process.arch}`
  const addons = readdirSync(folder).filter((file) => file.startsWith(own) && file.endsWith('.node'))
  if (addons.length === 0) return 'there is no addon yet'
  const built = newest(addons.map((file) => join(folder, file)))
  if (built < newest(SOURCES.map((source) => join(folder, source)))) return 'the addon is older than its sources'
  if (newest([join(folder, 'dist')]) < newest([join(folder, 'lib')])) return 'dist/ is older than lib/'
}

/**
 * @param {string[]} paths
 * @returns {number}
 */
function newest(paths) {
  const times = paths.map((path) => {
    const found = statSync(path, { throwIfNoEntry: false })
    if (!found) return 0
    if (!found.isDirectory()) return found.mtimeMs
    return newest(readdirSync(path).map((file) => join(path, file)))
  })
  return Math.max(0, ...times)
}
