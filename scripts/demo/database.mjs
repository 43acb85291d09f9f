// The database of the demo: the reports, guarded by fencing tokens, and a record of all events. The verdict is computed from
// that record alone.
//
// A process waits for the answer to each event before it continues. So the order of the record is the real order: an `enter`
// before another process's `leave` shows two holders at the same time.

/**
 * One line of the record. `name` is the lock of the round, `worker` the process, `at` the time in milliseconds.
 *
 * @typedef {'enter' | 'start' | 'finish' | 'leave' | 'killed' | 'failed'} What
 * @typedef {{ token?: bigint, code?: string, message?: string }} Details
 * @typedef {{ what: What, name: string, worker: string, at: number } & Details} Entry
 * @typedef {{ ok: boolean, text: string, faults: string[] }} Line
 */

/** The reports of all rounds, and the record. */
export class Database {
  /** @type {Entry[]} */
  entries = []
  /** @type {Map<string, { worker: string, token: bigint }>} */
  #reports = new Map()
  /** @type {Map<string, bigint>} */
  #newest = new Map()

  /** @param {What} what @param {string} name @param {string} worker @param {Details} [more] */
  note(what, name, worker, more = {}) {
    this.entries.push({ what, name, worker, at: performance.now(), ...more })
  }

  /** @param {string} name @param {string} worker @param {bigint} token */
  enter(name, worker, token) {
    this.note('enter', name, worker, { token })
    if (token > (this.#newest.get(name) ?? 0n)) this.#newest.set(name, token)
  }

  /** @param {string} name */
  find(name) {
    return this.#reports.has(name)
  }

  /**
   * Stores a report. Returns `false` for an older fencing token than the newest one, and for a second report.
   *
   * @param {string} name
   * @param {string} worker
   * @param {bigint} token
   */
  store(name, worker, token) {
    this.note('finish', name, worker, { token })
    if (token < (this.#newest.get(name) ?? 0n) || this.#reports.has(name)) return false
    this.#reports.set(name, { worker, token })
    return true
  }
}

/**
 * Judges the record. Returns the lines of the verdict.
 *
 * @param {Entry[]} entries
 * @param {string[]} names the rounds' locks; the holder of `names[killRound]` was to be killed in the middle of its job
 * @param {number} killRound
 */
export function judge(entries, names, killRound) {
  const rounds = names.map((name) => entries.filter((entry) => entry.name === name))
  return [once(rounds), oneAtATime(rounds), growing(rounds), takenOver(rounds[killRound]), noFailures(entries)]
}

/** @param {number} index */
const label = (index) => `round ${index + 1}`
/**
 * @param {string} text
 * @param {string[]} faults
 * @returns {Line}
 */
const check = (text, faults) => ({ ok: faults.length === 0, text, faults })

/** @param {Entry[][]} rounds */
function once(rounds) {
  const runs = rounds.map((round) => round.filter(({ what }) => what === 'finish').length)
  const faults = runs.flatMap((count, index) => (count === 1 ? [] : [`${label(index)}: ${count} times`]))
  const good = runs.filter((count) => count === 1).length
  return check(`the job ran to its end exactly once in ${good} of ${rounds.length} rounds`, faults)
}

/** @param {Entry[][]} rounds */
function oneAtATime(rounds) {
  const most = rounds.map((round) => {
    const inside = new Set()
    let max = 0
    for (const { what, worker } of round) {
      if (what === 'enter') inside.add(worker)
      if (what === 'leave' || what === 'killed' || what === 'failed') inside.delete(worker)
      max = Math.max(max, inside.size)
    }
    return max
  })
  const faults = most.flatMap((count, index) => (count <= 1 ? [] : [`${label(index)}: ${count} at the same time`]))
  const grants = rounds.flat().filter(({ what }) => what === 'enter').length
  return check(`${grants} times a process held a lock, and at most ${Math.max(...most)} at a time`, faults)
}

/** @param {Entry[][]} rounds */
function growing(rounds) {
  const faults = rounds.flatMap((round, index) => {
    const tokens = round.filter(({ what }) => what === 'enter').map(({ token = 0n }) => token)
    const falls = tokens.filter((token, i) => i > 0 && token <= tokens[i - 1]).length
    return falls === 0 ? [] : [`${label(index)}: ${tokens.join(', ')}`]
  })
  const good = rounds.length - faults.length
  return check(`fencing tokens grew from each holder to the next in ${good} of ${rounds.length} rounds`, faults)
}

/** @param {Entry[]} round */
function takenOver(round) {
  const killed = round.find(({ what }) => what === 'killed')
  if (!killed) return check('no process was killed during its job', ['the kill is missing'])
  const began = round.some(({ what, worker }) => what === 'start' && worker === killed.worker)
  const ended = round.some(({ what, worker }) => what === 'finish' && worker === killed.worker)
  const next = round.find((entry) => entry.what === 'enter' && entry.at > killed.at)
  const finisher = round.find((entry) => entry.what === 'finish' && entry.at > killed.at)
  const faults = []
  if (!began || ended) faults.push(`${killed.worker} was not killed during its job`)
  if (!next || !finisher) faults.push('no process took over')
  const successor = next
    ? `${next.worker} took over ${((next.at - killed.at) / 1000).toFixed(1)} s later`
    : 'no process took over'
  return check(`${killed.worker} was killed in the middle of its job, ${successor}`, faults)
}

/** @param {Entry[]} entries */
function noFailures(entries) {
  // A lost lease, after which the next process does the job, is correct behaviour.
  const failed = entries.filter(({ what, code }) => what === 'failed' && code !== 'LOCK_LOST')
  const faults = failed.map(({ worker, message }) => `${worker}: ${message}`)
  return check(`${failed.length} processes failed`, faults)
}
