// Starts the command line, `bin/holdfast.mjs`, on a SQLite store of its own.
import { execFileSync, spawn } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after } from 'node:test'
import { fileURLToPath } from 'node:url'
import { LockService } from '../index.js'
import { sleep } from './tools.mjs'

export const CLI = fileURLToPath(new URL('../bin/holdfast.mjs', import.meta.url))
export const TIMEOUT_MS = 120_000

export const folder = mkdtempSync(join(tmpdir(), 'holdfast-cli-'))
export const url = `sqlite:${join(folder, 'locks.sqlite')}`
export const locks = await LockService.connect(url)
after(async () => {
  await locks.close()
  rmSync(folder, { recursive: true, force: true })
})

/** Starts the command line. @param {string[]} args @param {NodeJS.ProcessEnv} [env] */
export function start(args, env) {
  const child = spawn(process.execPath, [CLI, ...args], { env: { ...process.env, HOLDFAST_URL: url, ...env } })
  const output = { stdout: '', stderr: '' }
  child.stdout.on('data', (data) => (output.stdout += data))
  child.stderr.on('data', (data) => (output.stderr += data))
  /** @type {Promise<{ code: number | null, stdout: string, stderr: string }>} */
  const ended = new Promise((resolve) => child.on('close', (code) => resolve({ code, ...output })))
  return { child, output, ended }
}

/** @param {string[]} args */
export const cli = (...args) => start(args).ended

/** Waits until all output of a stopped command has arrived: its length is the same three times. @param {() => number} length */
export async function settled(length) {
  for (let [last, same] = [length(), 0]; same < 3;) {
    await sleep(100)
    const next = length()
    same = next === last ? same + 1 : 0
    last = next
  }
  return length()
}

/** Whether there is a program. @param {string} file @param {string} version */
export function isInstalled(file, version) {
  try {
    execFileSync(file, [version], { stdio: 'ignore' })
    return true
  } catch {
    return false
  }
}

/** Returns the state of a process, such as `T` for a stopped one; `-` if it has ended. Needs `/proc`. @param {number | undefined} pid */
export function stateOf(pid) {
  try {
    const text = readFileSync(`/proc/${pid}/stat`, 'latin1')
    const state = text.slice(text.lastIndexOf(')') + 2)[0]
    return state === 'Z' ? '-' : state
  } catch {
    return '-'
  }
}
