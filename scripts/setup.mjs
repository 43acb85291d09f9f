// The set-up that every command of this project needs first. Has no dependencies itself.
import { spawnSync } from 'node:child_process'
import { existsSync, readFileSync, statfsSync, statSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { fileURLToPath } from 'node:url'

const root = fileURLToPath(new URL('..', import.meta.url))
const windows = process.platform === 'win32'

/**
 * Installs this package's development dependencies (or those of a folder in it) when they are missing or out of date.
 *
 * `npm ci` refuses a lock file without the optional packages of other platforms. `isLenient` installs from such a file.
 *
 * @param {string} [folder]
 */
export function installDependencies(folder = '.', { isLenient = false } = {}) {
  const cwd = new URL(`${folder}/`, `file://${root}`)
  // npm writes its copy of the lock file last: a newer lock file has not been installed.
  const [locked, installed] = ['package-lock.json', 'node_modules/.package-lock.json'].map((file) => new URL(file, cwd))
  if (existsSync(installed) && statSync(installed).mtimeMs >= statSync(locked).mtimeMs) return
  const { status, error } = spawnSync(
    'npm',
    [...(isLenient ? ['install', '--no-save'] : ['ci']), '--no-audit', '--no-fund', '--loglevel=error'],
    {
      cwd,
      stdio: 'inherit',
      shell: windows,
    },
  )
  if (status === 0) return
  // npm has printed the cause; a stack trace of this script would hide it.
  console.error(`npm could not install the packages of ${fileURLToPath(cwd)}${error ? `: ${error.message}` : ''}`)
  process.exit(1)
}

/** Ends this process with a message if Rust is missing or too old for the addon. */
export function requireRust() {
  const oldest = /^rust-version = "(.*)"$/m.exec(readFileSync(`${root}Cargo.toml`, 'utf8'))?.[1] ?? ''
  const problem = ['cargo', 'rustc'].map((command) => problemOf(command, oldest)).find(Boolean)
  if (!problem) return
  console.error(
    `The addon is built with Rust, and ${problem}. Install Rust ${oldest} or newer from https://rustup.rs, open a new terminal, and repeat the command.`,
  )
  process.exit(1)
}

/**
 * Returns why a command of Rust cannot be used; `undefined` when it can.
 *
 * @param {string} command
 * @param {string} oldest
 */
function problemOf(command, oldest) {
  // In this folder rustup reads rust-toolchain.toml. If that toolchain is not installed, rustup may print why.
  const { status, error, stdout } = spawnSync(command, ['--version'], {
    cwd: root,
    stdio: ['ignore', 'pipe', 'inherit'],
    encoding: 'utf8',
  })
  if (error) return `\`${command}\` is not on the PATH`
  if (status !== 0) return `\`${command} --version\` fails`
  const version = / (\d+\.\d+)/.exec(stdout)?.[1]
  if (version && version.localeCompare(oldest, 'en', { numeric: true }) < 0)
    return `\`${command}\` has the version ${version}`
}

/**
 * Returns the path of a development dependency's command, a script for `node`.
 *
 * @param {string} name
 * @param {string} [command]
 */
export function commandOf(name, command = name) {
  const folder = new URL(`node_modules/${name}/`, `file://${root}`)
  const { bin } = JSON.parse(readFileSync(new URL('package.json', folder), 'utf8'))
  return fileURLToPath(new URL(typeof bin === 'string' ? bin : bin[command], folder))
}

/**
 * Returns the folder for the servers' data: in memory if 5 GiB are free there. A disk that stalls for two seconds stalls mongod,
 * and the tests' leases are not much longer.
 */
export function serversDir() {
  const memory = '/dev/shm'
  try {
    const { bavail, bsize } = statfsSync(memory)
    if (bavail * bsize >= 5 * 2 ** 30) return memory
  } catch {
    // There is no such folder.
  }
  return tmpdir()
}
