// Checks each tracked text file: its size, hosts of package registries, and paths of one machine.
import { execFileSync } from 'node:child_process'
import { readFileSync } from 'node:fs'

/** A source file should have at most the first number of lines, and must have at most the second. */
const [MANY_LINES, MOST_LINES] = [300, 500]
const TEXT = /\.(rs|lua|sql|m?js|ts|json|md|toml|ya?ml|lock)$|^\.ci\/run$|^\.npmrc$/
const SOURCE = /(\.(rs|mjs)|^(lib|packages)\/.*\.ts)$/
// The patterns are assembled here so that this file does not match itself.
const REGISTRY = new RegExp(['registry\\.npmjs', 'index\\.crates', 'static\\.crates', 'files\\.pythonhosted'].join('|'))
const LOCAL_PATH = new RegExp('/' + '(work|root|home/\\w+|Users/\\w+)/')

/**
 * Lists the problems of the tree in the current directory. Prints the files that should be shorter.
 *
 * @returns {string[]}
 */
export function checkFiles() {
  const tracked = execFileSync('git', ['ls-files'], { encoding: 'utf8' }).split('\n')
  return tracked
    .filter((file) => TEXT.test(file))
    .flatMap((file) => {
      const text = readFileSync(file, 'utf8')
      const lines = SOURCE.test(file) ? text.split('\n').length : 0
      if (lines > MANY_LINES && lines <= MOST_LINES) console.log(`${file} has ${lines} lines`)
      return [
        lines > MOST_LINES && `${file} has ${lines} lines, more than ${MOST_LINES}`,
        REGISTRY.test(text) && `${file} names the host of a package registry`,
        LOCAL_PATH.test(text) && `${file} has a path of this machine`,
      ].filter((problem) => problem !== false)
    })
}
