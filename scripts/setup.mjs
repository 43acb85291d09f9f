// What every command of this project needs before it can start. Runs without any dependency.
import { spawnSync } from 'node:child_process'
import { existsSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const root = fileURLToPath(new URL('..', import.meta.url))
const windows = process.platform === 'win32'

/** Installs this package's development dependencies (or those of a folder in it) when they are missing. */
export function installDependencies(folder = '.') {
  const cwd = new URL(`${folder}/`, `file://${root}`)
  if (existsSync(new URL('node_modules/.package-lock.json', cwd))) return
  const { status, error } = spawnSync('npm', ['ci', '--no-audit', '--no-fund', '--loglevel=error'], {
    cwd,
    stdio: 'inherit',
    shell: windows,
  })
  if (status === 0) return
  // npm has said what it found; a stack trace of this script would only bury it.
  console.error(`npm ci failed in ${fileURLToPath(cwd)}${error ? `: ${error.message}` : ''}`)
  process.exit(1)
}
