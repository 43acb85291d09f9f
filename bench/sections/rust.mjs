// Pairs on PostgreSQL by holdfast's Rust API and by advisory locks, in one process and one thread, with the same driver
// (rust/postgres.rs).
import { execFileSync, spawn } from 'node:child_process'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import { hostTarget } from '../../scripts/pgo.mjs'
import { measureAll } from '../measure.mjs'
import { processUs } from '../process-cpu.mjs'
import { tables } from '../report.mjs'
import { onStore, postgres } from './stores.mjs'

/** holdfast makes pairs with two connections at most. */
const CONTENDERS = ['holdfast', 'advisory-pipelined-1', 'advisory-pipelined-2']
const NOTE =
  'A Rust program, in which the contenders share one process and one thread. `holdfast` is `Locks::acquire` and `Locks::release` with default ' +
  'options, whose statements are on one connection or two. The others are `pg_try_advisory_lock` and `pg_advisory_unlock` as prepared ' +
  'statements that tokio-postgres pipelines on one connection and on two; they do not exclude callers of the same connection.'

/** Returns the part of the report. A smoke test measures a debug build, which shares its dependencies with the Rust tests. */
export async function rust(timing) {
  const loads = timing.quick ? [1, 64] : [1, 64, 256]
  const contenders = timing.chosen(CONTENDERS)
  const path = build(timing.quick)
  return onStore(postgres, async ({ target, probe, title: version }) => {
    const title = `By the same Rust driver, ${version}`
    if (!path) return { fields: [], markdown: `## ${title}\n\nNot measured: there is no cargo.\n` }
    const program = new Program(path, target.urls[0])
    const start = async (names) => names.map((name) => ({ name, close: () => program.close() }))
    const call = ({ name }, load, ms) => program.ask(`${name} ${load} ${Math.ceil(ms)}`)
    const results = await measureAll({
      contenders,
      target,
      what: 'pair',
      loads,
      probe,
      shares: true,
      start,
      call,
      ...timing,
    })
    return { fields: [], markdown: tables({ title, note: NOTE, one: 'pair', results }) }
  })
}

/** Builds the program. Returns its path, or `undefined` without cargo. */
function build(isDebug) {
  // A smoke test has the features of the Rust tests, so that only the library is built again.
  const profile = isDebug ? [] : ['--release', '--no-default-features', '--features', 'postgres']
  const args = ['build', '--bench', 'postgres', '--target', hostTarget, '--message-format', 'json', ...profile]
  try {
    const options = { cwd: fileURLToPath(new URL('../..', import.meta.url)), maxBuffer: 2 ** 26 }
    const lines = execFileSync('cargo', args, { ...options, encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'] })
    const messages = lines
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line))
    return messages.find(({ target, executable }) => target?.name === 'postgres' && executable).executable
  } catch (error) {
    if (/** @type {any} */ (error).code !== 'ENOENT') throw error
    console.error('By the same Rust driver: not measured, there is no cargo')
  }
}

/** The running program, which answers one line at a time. */
class Program {
  #child
  #lines
  #ended

  constructor(path, url) {
    this.#child = spawn(path, [url], { stdio: ['pipe', 'pipe', 'inherit'] })
    this.#lines = createInterface(this.#child.stdout)[Symbol.asyncIterator]()
    this.#ended = new Promise((resolve) => this.#child.once('close', resolve))
  }

  /** Resolves to the figures of a measurement. */
  async ask(line) {
    const before = processUs(this.#child.pid)
    this.#child.stdin.write(`${line}\n`)
    const { value, done } = await this.#lines.next()
    if (done) throw new Error(`bench/rust/postgres.rs ended with ${await this.#ended} before its answer to: ${line}`)
    const figures = JSON.parse(value)
    return { ...figures, cpuUs: (processUs(this.#child.pid) - before) / figures.count }
  }

  async close() {
    this.#child.stdin.end()
    const code = await this.#ended
    if (code !== 0) throw new Error(`bench/rust/postgres.rs ended with ${code}`)
  }
}
