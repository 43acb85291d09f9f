// Counts the code lines of the product by folder, and compares them with the committed budget, whose sum only falls. Code lines are those
// without comments, blank lines and tests.
//
//   node scripts/code-lines.mjs           prints the count of each folder, and its budget
//   node scripts/code-lines.mjs --write   makes the counts the budget, unless their sum is larger
import { execFileSync } from 'node:child_process'
import { readFileSync, writeFileSync } from 'node:fs'
import { pathToFileURL } from 'node:url'

const BUDGET = new URL('code-lines.json', import.meta.url)
const PRODUCT = /^(src|lib|bin|packages)\/.*\.(rs|lua|sql|ts|mjs)$/
const TEST = /(^|\/)(tests?|contract|model|test)(\/|\.rs$)|hostile_peer|\.(d|spec)\.m?ts$/
/** The part of a source file that is its tests. */
const TESTS_OF_RUST = /\n#\[cfg\((all\()?test[^\n]*\n(pub\S* )?mod \w+ \{[^]*/

/** Returns the folder that has a budget: `src/engine/sql/postgres`, `src/service`, `lib`. @param {string} path */
function folderOf(path) {
  const [top, ...rest] = path.split('/').slice(0, -1)
  return [top, ...(top === 'src' ? rest.slice(0, 3) : [])].join('/')
}

/** Returns the number of code lines of a file. @param {string} path @param {string} text */
export function codeLines(path, text) {
  const comment = /\.(lua|sql)$/.test(path) ? /^--/ : /^(\/\/|\/\*|\*(?=[ /]|$))/
  const lines = text.replace(path.endsWith('.rs') ? TESTS_OF_RUST : /(?!)/, '').split('\n')
  return lines.filter((line) => line.trim() && !comment.test(line.trim())).length
}

/** Counts the tracked files of the current directory. Returns the code lines by folder. */
export function countLines() {
  const tracked = execFileSync('git', ['ls-files'], { encoding: 'utf8' }).split('\n')
  /** @type {Record<string, number>} */
  const counts = {}
  for (const path of tracked
    .filter((file) => PRODUCT.test(file) && (file === 'src/model.rs' || !TEST.test(file)))
    .sort()) {
    const folder = folderOf(path)
    counts[folder] = (counts[folder] ?? 0) + codeLines(path, readFileSync(path, 'utf8'))
  }
  return counts
}

/**
 * Compares counts with a budget. A folder that has become smaller is a problem, too: the budget is to fall with it.
 *
 * @param {Record<string, number>} counts
 * @param {Record<string, number>} budget
 */
export function problemsOfLines(counts, budget) {
  return Object.keys({ ...counts, ...budget }).flatMap((folder) => {
    const [count, limit] = [counts[folder] ?? 0, budget[folder] ?? 0]
    if (count > limit) return [`${folder} has ${count} code lines, more than its budget of ${limit}`]
    return count < limit
      ? [`${folder} has ${count} code lines: its budget of ${limit} is to fall (node scripts/code-lines.mjs --write)`]
      : []
  })
}

/** Lists the problems of the tree in the current directory. */
export const checkLines = () => problemsOfLines(countLines(), JSON.parse(readFileSync(BUDGET, 'utf8')))

/** @param {Record<string, number>} counts */
const sumOf = (counts) => Object.values(counts).reduce((sum, count) => sum + count, 0)

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [counts, budget] = [countLines(), JSON.parse(readFileSync(BUDGET, 'utf8'))]
  for (const [folder, count] of Object.entries(counts))
    console.log(`${String(count).padStart(6)} of ${budget[folder] ?? 0}  ${folder}`)
  console.log(`${String(sumOf(counts)).padStart(6)} of ${sumOf(budget)}`)
  if (process.argv.includes('--write')) {
    if (sumOf(counts) > sumOf(budget)) throw new Error('the code lines have become more: the budget only falls')
    writeFileSync(BUDGET, `${JSON.stringify(counts, null, 2)}\n`)
  }
  const problems = checkLines()
  for (const problem of problems) console.error(problem)
  process.exitCode = problems.length > 0 ? 1 : 0
}
