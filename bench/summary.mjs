// The first table of the report: holdfast beside the fastest lock library of the same run, and beside the bare code.
import { median, ratio, spread } from './report.mjs'

const perSecond = (rounds) => spread(rounds, 'perSecond')[1]

/** How large a figure of holdfast is where the same one of `other` is 1, round by round. */
const share = (results, other, field) => median(results.holdfast.map((round, i) => round[field] / results[other][i][field]))

/**
 * The rows of `fields`, where `about` has each contender's `kind`. A field names its `floor`, the contender without a
 * library that all are compared with; a quorum has none.
 */
export function summary(fields, about) {
  const rows = fields.flatMap(({ title, results, floor }) =>
    Object.entries(results).map(([load, here]) => {
      const libraries = Object.keys(here).filter((module) => !module.startsWith('holdfast') && about[module].kind === 'library')
      const fastest = libraries.reduce((best, module) => (perSecond(here[module]) > perSecond(here[best]) ? module : best))
      const times = (module, own) => `${ratio(here, module, own).toFixed(2)} ×`
      const using = here['holdfast-using'] ? times(fastest, 'holdfast-using') : ''
      const shares = ['loopUs', 'p99Us'].map((field) => share(here, fastest, field).toFixed(2))
      return `| ${title} | ${load} | ${fastest} | ${times(fastest)} | ${using} | ${shares.join(' | ')} | ${floor ? `${times(floor)} ${floor}` : ''} |`
    }),
  )
  return [
    '## Summary',
    '',
    'holdfast beside the fastest lock library of the same part: how many times as many calls per second, and how large its ' +
      'event-loop time per call and its p99 are where those of that library are 1. holdfast is `acquire` and `release()`, or `using` ' +
      'where the column says so. The last column is against no library at all.',
    '',
    '| | in flight | fastest lock library | holdfast is | with `using` | event loop | p99 | holdfast is, without a library |',
    '|---|---:|---|---:|---:|---:|---:|---:|',
    ...rows,
    '',
  ].join('\n')
}

/** What each contender is, does, and how it is set up. */
export function contenderTable(about) {
  return [
    '## Contenders',
    '',
    '| | is | does | set up here |',
    '|---|---|---|---|',
    ...Object.entries(about).map(([module, { kind, does, setting }]) => `| ${module} | ${kind} | ${does} | ${setting} |`),
    '',
  ].join('\n')
}
