// Formats measurements as Markdown.
import { readFileSync } from 'node:fs'
import { cpus } from 'node:os'

/** The machine of the figures. */
export const machine = `${cpus().length} × ${cpus()[0].model}, Node ${process.version}`

export const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)]

/** Returns the value that a share of the sorted values does not exceed. */
export const percentile = (sorted, share) => sorted[Math.max(0, Math.ceil(sorted.length * share) - 1)]

function version(name) {
  const file = new URL(`node_modules/${name}/package.json`, import.meta.url)
  return JSON.parse(readFileSync(file, 'utf8')).version.replace(/^v/, '')
}

/** Lists the versions of holdfast and of `packages`. `mongodb3` is the driver for mongodb-lock. */
export function contenderVersions(packages) {
  const own = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8')).version
  const peers = packages.map((name) => `${name === 'mongodb3' ? 'that on mongodb' : name} ${version(name)}`)
  return [`holdfast ${own}`, ...peers].join(', ')
}

/** Returns the minimum, the median and the maximum of a figure over the rounds. */
export function spread(rounds, field) {
  const values = rounds.map((round) => round[field])
  return [Math.min(...values), median(values), Math.max(...values)]
}

/**
 * Formats `median (min–max)`, or the value that all rounds have.
 *
 * @param {number[]} range the minimum, the median and the maximum
 */
export function cell([low, mid, high], digits) {
  const [from, value, to] = [low, mid, high].map((number) => number.toFixed(digits))
  return from === to ? value : `${value} (${from}–${to})`
}

/** Returns the ratio of a figure of `own` to that of `other`, by default the calls per second: the median over the rounds. */
export const ratio = (results, other, own = ownOf(results), field = 'perSecond') =>
  median(results[other].map((round, i) => results[own][i][field] / round[field]))

/** The first contender: holdfast, unless it was not chosen. */
export const ownOf = (results) => Object.keys(results)[0]

/**
 * Returns the columns of a field's tables. `one` is the name of a call.
 *
 * @returns {[string, string, number][]}
 */
const columns = (one) => [
  [`${one === 'try' ? 'trie' : one}s per second`, 'perSecond', 0],
  ['p50, µs', 'p50Us', 0],
  ['p99, µs', 'p99Us', 0],
  ['event-loop delay, p99, µs', 'delayUs', 0],
  [`event loop, µs per ${one}`, 'loopUs', 1],
  [`client CPU, µs per ${one}`, 'cpuUs', 1],
  [`server CPU, µs per ${one}`, 'serverUs', 1],
  [`requests per ${one}`, 'requests', 2],
  ['with what scripts call', 'commands', 2],
  [`bytes per ${one}`, 'bytes', 0],
]

/** Names a load: a number of calls in flight, or text. */
export const inFlight = (load) => (Number(load) > 0 ? `${load} in flight` : load)

/**
 * Formats the tables of a field `{ title, one, results }`, one for each number of calls in flight. The last column is the ratio
 * of holdfast's throughput to the contender's.
 */
export function tables({ title, note, one, results }) {
  const lines = [`## ${title}`, '', ...(note ? [note, ''] : [])]
  for (const [load, byContender] of Object.entries(results)) {
    const shown = columns(one).filter(([, field]) => byContender[ownOf(byContender)][0][field] !== undefined)
    lines.push(`### ${inFlight(load)}`, '')
    lines.push(`| | ${shown.map(([name]) => name).join(' | ')} | holdfast is |`)
    lines.push(`|---|${'---:|'.repeat(shown.length + 1)}`)
    for (const [module, rounds] of Object.entries(byContender)) {
      const cells = shown.map(([, field, digits]) => cell(spread(rounds, field), digits))
      lines.push(`| ${module} | ${cells.join(' | ')} | ${ratio(byContender, module).toFixed(2)} × |`)
    }
    lines.push('')
  }
  return lines.join('\n')
}

/** Returns the summary of a field: minimum, median and maximum of each figure, and the ratio. */
export function compact({ title, note, one, results }) {
  const round = (number) => Number(number.toPrecision(4))
  const figures = (byContender) =>
    Object.fromEntries(
      Object.entries(byContender).map(([module, rounds]) => {
        const fields = columns(one).filter(([, field]) => rounds[0][field] !== undefined)
        const kept = fields.map(([, field]) => [field, spread(rounds, field).map(round)])
        return [module, { ...Object.fromEntries(kept), holdfastIs: round(ratio(byContender, module)) }]
      }),
    )
  return {
    title,
    note,
    one,
    loads: Object.fromEntries(Object.entries(results).map(([load, all]) => [load, figures(all)])),
  }
}
