// The first table of the report: holdfast compared with the fastest lock library of the same run, and with no library.
import { ratio, spread } from './report.mjs'

const perSecond = (rounds) => spread(rounds, 'perSecond')[1]

/**
 * Formats the rows of `fields`. `about` has each contender's `kind`. A field names its `floor`, the contender without a library; a
 * quorum has none.
 */
export function summary(fields, about) {
  const rows = fields.flatMap(({ title, results, floor }) =>
    Object.entries(results).map(([load, here]) => {
      const libraries = Object.keys(here).filter(
        (name) => !name.startsWith('holdfast') && about[name].kind === 'library',
      )
      const [fastest] = libraries.sort((one, other) => perSecond(here[other]) - perSecond(here[one]))
      const times = (name, own) => (here[name] ? `${ratio(here, name, own).toFixed(2)} ×` : '')
      const using = fastest && here['holdfast-using'] ? times(fastest, 'holdfast-using') : ''
      const loop = using ? ratio(here, fastest, 'holdfast-using', 'loopUs').toFixed(2) : ''
      const shares = ['loopUs', 'p99Us'].map((field) =>
        fastest ? ratio(here, fastest, undefined, field).toFixed(2) : '',
      )
      const least = here[floor] ? `${times(floor)} ${floor}` : ''
      return `| ${title} | ${load} | ${fastest ?? ''} | ${times(fastest)} | ${using} | ${shares.join(' | ')} | ${least} | ${loop} |`
    }),
  )
  return [
    '## Summary',
    '',
    'The ratio of holdfast to the fastest lock library of the same part: calls per second, event-loop time per call, and p99. ' +
      'holdfast is `acquire` and `release()`, or `using` where the column says so; in the HTTP service it is `using`. “Without a ' +
      'library” is the ratio of calls per second to code without a lock library.',
    '',
    '| | in flight | fastest lock library | holdfast is | with `using` | event loop | p99 | holdfast is, without a library | event loop with `using` |',
    '|---|---:|---|---:|---:|---:|---:|---:|---:|',
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
