// The first table of the report: holdfast compared with the fastest lock library of the same run, and with no library.
import { median, ratio, spread } from './report.mjs'

const perSecond = (rounds) => spread(rounds, 'perSecond')[1]

/** Returns the ratio of a figure of holdfast to that of `other`: the median over the rounds. */
const share = (results, other, field) =>
  median(results.holdfast.map((round, i) => round[field] / results[other][i][field]))

/**
 * Formats the rows of `fields`. `about` has each contender's `kind`. A field names its `floor`, the contender without a
 * library; a quorum has none.
 */
export function summary(fields, about) {
  const rows = fields.flatMap(({ title, results, floor }) =>
    Object.entries(results).map(([load, here]) => {
      const libraries = Object.keys(here).filter(
        (module) => !module.startsWith('holdfast') && about[module].kind === 'library',
      )
      const fastest = libraries.reduce((best, module) =>
        perSecond(here[module]) > perSecond(here[best]) ? module : best,
      )
      const times = (module, own) => `${ratio(here, module, own).toFixed(2)} ×`
      const using = here['holdfast-using'] ? times(fastest, 'holdfast-using') : ''
      const shares = ['loopUs', 'p99Us'].map((field) => share(here, fastest, field).toFixed(2))
      return `| ${title} | ${load} | ${fastest} | ${times(fastest)} | ${using} | ${shares.join(' | ')} | ${floor ? `${times(floor)} ${floor}` : ''} |`
    }),
  )
  return [
    '## Summary',
    '',
    'The ratio of holdfast to the fastest lock library of the same part: calls per second, event-loop time per call, and p99. ' +
      'holdfast is `acquire` and `release()`, or `using` where the column says so. The last column is the ratio of calls per second to code without a lock library.',
    '',
    '| | in flight | fastest lock library | holdfast is | with `using` | event loop | p99 | holdfast is, without a library |',
    '|---|---:|---|---:|---:|---:|---:|---:|',
    ...rows,
    '',
  ].join('\n')
}

/** Formats the kind, the functions and the configuration of each contender. */
export function contenderTable(about) {
  return [
    '## Contenders',
    '',
    '| | is | does | set up here |',
    '|---|---|---|---|',
    ...Object.entries(about).map(
      ([module, { kind, does, setting }]) => `| ${module} | ${kind} | ${does} | ${setting} |`,
    ),
    '',
  ].join('\n')
}
