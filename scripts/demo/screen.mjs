// The output of the demo: a few lines per round that are redrawn in a terminal, or a log on a pipe.
import { STEPS } from './job.mjs'

const COLOURS = { green: 32, red: 31, yellow: 33, cyan: 36, dim: 2, bold: 1 }

/**
 * @typedef {keyof typeof COLOURS} Colour
 * @typedef {{ state?: string, step?: number, pid?: number, token?: bigint, message?: string }} Row
 * @typedef {Pick<NodeJS.WriteStream, 'isTTY' | 'columns'> & { on(event: 'error', listener: () => void): unknown, write(text: string): unknown }} Output
 */
export class Screen {
  #out
  #live
  #start = performance.now()
  /** @type {Map<string, Row>} */
  #rows = new Map()
  #drawn = 0

  /** @param {Output} out */
  constructor(out) {
    this.#out = out
    this.#live = Boolean(out.isTTY) && process.env.TERM !== 'dumb'
    // A closed pipe or terminal is no failure.
    out.on('error', () => {})
  }

  /** @param {Colour} colour @param {string} text */
  paint(colour, text) {
    const plain = !this.#live || process.env.NO_COLOR
    return plain ? text : `\x1b[${COLOURS[colour]}m${text}\x1b[0m`
  }

  print(text = '') {
    this.#out.write(`${text}\n`)
  }

  /** @param {string} title */
  round(title) {
    this.#rows = new Map()
    this.#drawn = 0
    this.print()
    this.print(this.paint('bold', title))
  }

  /**
   * Adds details to the row of a process.
   *
   * @param {string} worker
   * @param {Row} more
   */
  setDetails(worker, more) {
    const row = { ...this.#rows.get(worker), ...more }
    this.#rows.set(worker, row)
    return row
  }

  /**
   * Shows the state of a process: waits, works, stored, aside, refused, killed or failed.
   *
   * @param {string} worker
   * @param {string} state
   * @param {Row} [more]
   */
  show(worker, state, more = {}) {
    const row = this.setDetails(worker, { state, ...more })
    if (this.#live) return this.#draw()
    if (state === 'works' && (row.step ?? 0) > 0) return
    const seconds = ((performance.now() - this.#start) / 1000).toFixed(2).padStart(6)
    this.print(`${seconds} s  ${this.#line(worker, row)}`)
  }

  #draw() {
    if (this.#drawn > 0) this.#out.write(`\x1b[${this.#drawn}A`)
    for (const [worker, row] of this.#rows) this.#out.write(`\x1b[2K  ${this.#line(worker, row)}\n`)
    this.#drawn = this.#rows.size
  }

  /** @param {string} worker @param {Row} row */
  #line(worker, row) {
    // A wrapped line would break the redrawing.
    const width = this.#live ? (this.#out.columns || 80) - 3 : Infinity
    const [colour, text] = describe(row)
    const line = `${worker}  pid ${String(row.pid).padEnd(7)}  ${text}`
    return this.paint(colour, line.slice(0, width))
  }

  /** @param {import('./database.mjs').Line[]} lines */
  verdict(lines) {
    this.print()
    this.print(this.paint('bold', 'Verdict, from the record of all events'))
    for (const { ok, text, faults } of lines) {
      this.print(`  ${ok ? this.paint('green', 'ok  ') : this.paint('red', 'FAIL')}  ${text}`)
      for (const fault of new Set(faults)) this.print(`          ${fault}`)
    }
    const good = lines.every(({ ok }) => ok)
    this.print(good ? this.paint('green', 'PASS') : this.paint('red', 'FAIL: this is not what a lock promises'))
  }
}

/**
 * @param {Row} row
 * @returns {[Colour, string]}
 */
function describe({ state, token, step = 0, message }) {
  const bar = `${'█'.repeat(step)}${'░'.repeat(STEPS - step)}`
  switch (state) {
    case 'waits':
      return ['dim', 'waits for the lock']
    case 'works':
      return ['cyan', `won          ${bar}  token ${token}`]
    case 'stored':
      return ['green', `done         ${bar}  token ${token}, report stored`]
    case 'aside':
      return ['dim', `stood aside  token ${token}, found the report`]
    case 'refused':
      return ['red', `refused      token ${token}, the report was there by then`]
    case 'killed':
      return ['red', `killed       ${bar}  token ${token}, SIGKILL`]
    default:
      return ['red', `failed       ${message}`]
  }
}
