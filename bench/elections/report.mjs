// The report, as Markdown.
import { median } from '../report.mjs'

const ms = (value) => (value >= 1000 ? `${(value / 1000).toFixed(1)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`)

/** Formats `median (minimum–maximum)` of times. */
function times(values) {
  const [low, middle, high] = [Math.min(...values), median(values), Math.max(...values)].map(ms)
  return low === high ? middle : `${middle} (${low}–${high})`
}

/** Formats how often, and for how long, two jobs ran at once. */
function late(outcomes) {
  const some = outcomes.filter(({ lateSteps }) => lateSteps > 0)
  if (some.length === 0) return 'never'
  const longest = `up to ${ms(Math.max(...some.map(({ lateMs }) => lateMs)))}`
  const end = some.some(({ isLateAtEnd }) => isLateAtEnd) ? ', until the end of the trial' : ''
  return `${some.length} of ${outcomes.length}: ${longest}${end}`
}

/** Formats the table of a fault. `results` are the outcomes by contender. */
export function faultTable({ title, text }, results) {
  const rows = Object.entries(results).map(([name, outcomes]) => {
    const next = outcomes.flatMap(({ nextMs }) => nextMs ?? [])
    const kept = outcomes.filter(({ isKept }) => isKept).length
    const cells = [
      next.length > 0 ? times(next) : 'none began',
      `${kept} of ${outcomes.length}`,
      times(outcomes.map(({ idleMs }) => idleMs)),
      late(outcomes),
    ]
    return `| ${name} | ${cells.join(' | ')} |`
  })
  const head = '| | the next leader begins after | the leader stays | longest time without a job | two jobs at once |'
  return [`## ${title}`, '', text, '', head, '|---|---|---|---|---|', ...rows, ''].join('\n')
}

/** Formats the table of ticks. `results` are the runs of each tick by contender. */
export function tickTable(text, results, contenders) {
  const rows = Object.entries(results).map(([name, runs]) => {
    const first = `| ${name} | ${contenders[name].settings} |`
    const share = (isCounted) => `${runs.filter(isCounted).length} of ${runs.length}`
    return `${first} ${share((n) => n === 1)} | ${share((n) => n === 0)} | ${share((n) => n > 1)} |`
  })
  const head = '| | how | ticks with one run | with none | with several |'
  return ['## A job once per tick', '', text, '', head, '|---|---|---:|---:|---:|', ...rows, ''].join('\n')
}

/** Formats how the candidates are started. */
export function settingsTable(contenders) {
  const rows = Object.entries(contenders).map(([name, { settings }]) => `| ${name} | ${settings} |`)
  return ['## The candidates', '', '| | how |', '|---|---|', ...rows, ''].join('\n')
}
