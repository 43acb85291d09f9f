// Runs the named steps of a long command and the programs in them, and prints a table of their durations.
import { spawn } from 'node:child_process'
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs'
import { constants, setPriority } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'

const root = fileURLToPath(new URL('..', import.meta.url))

/** @type {{ name: string, seconds: number, cpuSeconds: number | undefined }[]} */
const steps = []

/** Returns the CPU seconds of all ended child processes; `undefined` where the system does not report them. */
function childSeconds() {
  try {
    const fields = readFileSync('/proc/self/stat', 'utf8')
      .replace(/^.*\) /s, '')
      .split(' ')
    // cutime and cstime of proc(5), in ticks of 10 ms.
    return (Number(fields[13]) + Number(fields[14])) / 100
  } catch {
    return undefined
  }
}

/**
 * Runs a step and prints its name before, and its duration after it. Resolves to the result of `work`.
 *
 * @template T
 * @param {string} name
 * @param {() => T | Promise<T>} work
 */
export async function step(name, work) {
  const [startedAt, cpuBefore] = [performance.now(), childSeconds()]
  console.log(`\n== ${name}`)
  const result = await work()
  const seconds = (performance.now() - startedAt) / 1000
  const cpuSeconds = cpuBefore === undefined ? undefined : (childSeconds() ?? NaN) - cpuBefore
  steps.push({ name, seconds, cpuSeconds })
  console.log(`== ${name}: ${seconds.toFixed(1)} s`)
  return result
}

/** Prints the steps so far, also to `target/steps.txt`: seconds, and CPU seconds of the processes that they started. */
export function printSteps() {
  const total = { name: 'total', seconds: 0, cpuSeconds: 0 }
  for (const { seconds, cpuSeconds } of steps) {
    total.seconds += seconds
    total.cpuSeconds += cpuSeconds ?? 0
  }
  const rows = [...steps, total].map(
    ({ name, seconds, cpuSeconds }) =>
      `${seconds.toFixed(1).padStart(9)}${(cpuSeconds?.toFixed(1) ?? '-').padStart(9)}  ${name}`,
  )
  const table = ['        s    CPU s  step', ...rows].join('\n')
  mkdirSync(join(root, 'target'), { recursive: true })
  writeFileSync(join(root, 'target/steps.txt'), `${table}\n`)
  console.log(`\n${table}`)
}

/**
 * Runs a command, and prints its output, or only the lines for which `shows` returns true. Resolves to its exit code and its
 * stdout. `isBackground`: it uses only the time of the cores that nothing else needs.
 *
 * @param {string} command
 * @param {string[]} args
 * @param {Record<string, string>} [env]
 * @param {(line: string) => boolean} [shows]
 * @param {boolean} [isBackground]
 * @returns {Promise<{ code: number | null, output: string }>}
 */
export function run(command, args, env = {}, shows, isBackground = false) {
  return new Promise((resolve, reject) => {
    const child = spawn(command, args, {
      cwd: root,
      env: { ...process.env, ...env },
      stdio: ['ignore', 'pipe', 'inherit'],
      shell: process.platform === 'win32' && command === 'npm',
    })
    if (isBackground && child.pid) setPriority(child.pid, constants.priority.PRIORITY_LOW)
    let output = ''
    child.stdout.on('data', (chunk) => {
      output += chunk
      if (!shows) process.stdout.write(chunk)
    })
    if (shows) createInterface(child.stdout).on('line', (line) => shows(line) && console.log(line))
    child.on('error', reject)
    child.on('close', (code) => resolve({ code, output }))
  })
}
