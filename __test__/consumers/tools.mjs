// What the cases of this folder and of `runtimes/` share.
import { execFile } from 'node:child_process'
import { existsSync, mkdtempSync, readFileSync, realpathSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

export const CONSUMERS = fileURLToPath(new URL('.', import.meta.url))
export const RUNTIMES = fileURLToPath(new URL('../runtimes/', import.meta.url))
/** The program that is bundled. */
export const ENTRY = join(CONSUMERS, 'bundle.cjs')
const TIMEOUT_MS = 600_000

/**
 * A case has an empty folder `temp`, and the URLs of the servers by their variables. `of` is the package whose version is printed. `run`
 * may resolve to a text for the table.
 *
 * @typedef {{ temp: string, urls: Record<string, string> }} Context
 * @typedef {{ name: string, of: string, run: (context: Context) => Promise<string | void> }} Case
 * @typedef {{ cwd?: string, env?: NodeJS.ProcessEnv, all?: boolean }} RunOptions
 */

/** A case throws it where it cannot run. The message is the reason. */
export class Skip extends Error {}

/**
 * Runs a case. Resolves to its text.
 *
 * @param {Case} tested
 * @param {Context['urls']} [urls]
 */
export async function runCase({ run }, urls = {}) {
  const temp = realpathSync(mkdtempSync(join(tmpdir(), 'holdfast-runtimes-')))
  try {
    return (await run({ temp, urls })) ?? ''
  } finally {
    rmSync(temp, { recursive: true, force: true })
  }
}

/**
 * Returns the version of a package that is installed in `folder`; `-` if it is not installed.
 *
 * @param {string} folder
 * @param {string} name
 */
export function versionOf(folder, name) {
  const path = join(folder, 'node_modules', name, 'package.json')
  return existsSync(path) ? JSON.parse(readFileSync(path, 'utf8')).version : '-'
}

/**
 * Returns the functions that run programs in `folder`, and scripts of the packages that are installed there.
 *
 * @param {string} folder
 */
export function toolsOf(folder) {
  /**
   * Returns the path of a file in an installed package. Skips the case if the package is not installed.
   *
   * @param {string} name
   */
  function packaged(name, file = 'package.json') {
    const path = join(folder, 'node_modules', name, file)
    if (!existsSync(path)) throw new Skip(`the package ${name} has no ${file} on this system`)
    return path
  }

  /**
   * Runs a program. Resolves to its standard output, or with `all` to all of its output, which an error contains as well.
   *
   * @param {string} program
   * @param {string[]} args
   * @param {RunOptions} [options]
   */
  async function run(program, args, { cwd = folder, env = {}, all = false } = {}) {
    /** @type {NodeJS.ProcessEnv} */
    const environment = { ...process.env, NO_COLOR: '1', ...env }
    // A test runner must not detect that it runs inside another one.
    delete environment.NODE_TEST_CONTEXT
    const options = { cwd, env: environment, timeout: TIMEOUT_MS, maxBuffer: 2 ** 26 }
    const { stdout, stderr } = await promisify(execFile)(program, args, options).catch((error) => {
      const end = error.killed ? 'no end within its time limit' : `exit code ${error.code ?? error.signal}`
      throw new Error(`${end}\n${error.stdout}\n${error.stderr}`)
    })
    return all ? `${stdout}\n${stderr}` : stdout.trim()
  }

  /**
   * Runs a script of an installed package with Node.
   *
   * @param {string} name
   * @param {string} script
   * @param {string[]} args
   * @param {RunOptions} [options]
   */
  const runPackaged = (name, script, args, options) => run(process.execPath, [packaged(name, script), ...args], options)

  /**
   * Runs a bundle, or another program that prints what `bundle.cjs` prints.
   *
   * @param {string} program
   * @param {string[]} args
   * @param {RunOptions} [options]
   */
  async function mustWork(program, args, options) {
    const printed = await run(program, args, options)
    if (printed !== 'true true') throw new Error(`it printed: ${printed}`)
  }

  return { packaged, run, runPackaged, mustWork }
}

/** @param {{ message?: string, text?: string }[]} list */
export const messages = (list) => list.map((each) => each.message ?? each.text ?? String(each))

/**
 * Throws unless `list` is empty.
 *
 * @param {string} what
 * @param {string[]} list
 */
export function mustBeEmpty(what, list) {
  if (list.length > 0) throw new Error(`${what}: ${list.join('\n')}`)
}
