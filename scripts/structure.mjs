// Checks the structure of `src/`: circles of imports, the number of files in a folder, conditional compilation, and the size of the trait
// of all stores. Checks that each fault
// of mutants.json can be planted.
import { spawnSync } from 'node:child_process'
import { existsSync, readdirSync, readFileSync } from 'node:fs'
import { dirname, join, relative, sep } from 'node:path'

/** Files that import each other in a circle: at most this many. */
const MOST_IN_CIRCLE = 2
/** Files in one folder. */
const MOST_IN_FOLDER = 12
/** Lines with `cfg(unix)`, or its negation, outside of tests. */
const MOST_CFG_LINES = 15
/** Items of a file, other than modules, that exist only with a feature, outside of tests: what needs no optional crate is always there. */
const MOST_OF_FEATURES = 20
/** Methods of the trait of all stores. None has a default. */
const MOST_METHODS = 9
/** Lines of a source file that is not a test. */
const MOST_LINES = 400

/** @param {string} path */
const isTest = (path) => /(^|\/)tests?(\/|\.rs$)|^engine\/contract\//.test(path)

/**
 * Returns the module of a file, by its path below `src/`.
 *
 * @param {string} path
 */
function moduleOf(path) {
  const parts = path.replace(/\.rs$/, '').split('/')
  return ['mod', 'lib'].includes(parts.at(-1) ?? '') ? parts.slice(0, -1) : parts
}

/**
 * Expands the braces of an import: `a::{b, c::{d, e}}` becomes `a::b`, `a::c::d` and `a::c::e`.
 *
 * @param {string} text
 * @returns {string[]}
 */
function expand(text) {
  const open = text.indexOf('{')
  if (open < 0) return [text.split(' as ')[0].trim()]
  let [depth, start] = [0, open + 1]
  const parts = []
  for (let at = open; at < text.length; at++) {
    if (text[at] === '{') depth++
    if (text[at] === '}' ? --depth === 0 : text[at] === ',' && depth === 1) {
      parts.push(text.slice(start, at))
      start = at + 1
    }
  }
  return parts.filter((part) => part.trim()).flatMap((part) => expand(text.slice(0, open).trim() + part.trim()))
}

/**
 * Returns the modules that a file names, relative ones resolved.
 *
 * @param {string[]} module
 * @param {string} text
 */
function imports(module, text) {
  const code = text.replace(/\/\/.*$/gm, '').replace(/#\[cfg\(test\)\]\s*mod \w+ \{[\s\S]*/, '')
  const paths = [...code.matchAll(/\buse\s+([^;]+);/g)].flatMap(([, tree]) => expand(tree.replace(/\s+/g, ' ')))
  paths.push(...[...code.matchAll(/\b(?:crate|super|self)(?:::\w+)+/g)].map(([path]) => path))
  return paths.map((path) => {
    const parts = path.split('::').map((part) => part.trim())
    let base = [...module]
    if (parts[0] === 'crate') base = []
    while (['crate', 'self', 'super'].includes(parts[0])) if (parts.shift() === 'super') base.pop()
    return [...base, ...parts]
  })
}

/**
 * Returns the imports between files: `{ file: Set of files }`. A `mod.rs` and the files below it are one room, whose imports of each
 * other do not count. Those of `engine/mod.rs` count: it has the trait that all stores implement.
 *
 * @typedef {Record<string, Set<string>>} Graph
 * @param {Record<string, string>} files
 */
export function importGraph(files) {
  const fileOf = new Map(Object.keys(files).map((path) => [moduleOf(path).join('::'), path]))
  /** @param {string} path @param {string} other */
  const isBelow = (path, other) =>
    other !== 'engine/mod.rs' &&
    /(^|\/)(mod|lib)\.rs$/.test(other) &&
    (dirname(other) === '.' || path.startsWith(`${dirname(other)}/`))
  /** @type {Graph} */
  const graph = {}
  for (const [path, text] of Object.entries(files)) {
    graph[path] = new Set()
    for (const module of imports(moduleOf(path), text)) {
      while (module.length > 0 && !fileOf.has(module.join('::'))) module.pop()
      const other = fileOf.get(module.join('::'))
      if (other && other !== path && !isBelow(path, other) && !isBelow(other, path)) graph[path].add(other)
    }
  }
  return graph
}

/**
 * Returns the circles: the largest sets of files each of which imports each other one, directly or through others.
 *
 * @param {Graph} graph
 */
export function circles(graph) {
  /** @param {string} from */
  const reachable = (from) => {
    /** @type {Set<string>} */
    const found = new Set()
    const open = [...graph[from]]
    for (let path = open.pop(); path !== undefined; path = open.pop()) {
      if (found.has(path)) continue
      found.add(path)
      open.push(...graph[path])
    }
    return found
  }
  const reach = Object.fromEntries(Object.keys(graph).map((path) => [path, reachable(path)]))
  const rest = new Set(Object.keys(graph).filter((path) => reach[path].has(path)))
  const result = []
  for (const path of rest) {
    const circle = [...rest].filter((other) => reach[path].has(other) && reach[other].has(path))
    circle.forEach((other) => rest.delete(other))
    result.push(circle)
  }
  return result
}

/**
 * Lists the problems of files, `{ path: text }` with paths below `src/`.
 *
 * @param {Record<string, string>} files
 */
export function problemsOf(files) {
  const problems = []
  const paths = Object.keys(files)
  for (const folder of new Set(paths.map((path) => dirname(path)))) {
    const { length } = paths.filter((path) => dirname(path) === folder)
    if (length > MOST_IN_FOLDER) problems.push(`src/${folder} has ${length} files, more than ${MOST_IN_FOLDER}`)
  }
  const product = Object.fromEntries(Object.entries(files).filter(([path]) => path.endsWith('.rs') && !isTest(path)))
  for (const circle of circles(importGraph(product))) {
    if (circle.length > MOST_IN_CIRCLE)
      problems.push(`${circle.length} files import each other in a circle: ${circle.join(', ')}`)
  }
  let [cfgLines, ofFeatures] = [0, 0]
  for (const [path, text] of Object.entries(product)) {
    const lines = text.trimEnd().split('\n')
    cfgLines += lines.filter((line) => /\bcfg\(.*\bunix\b/.test(line)).length
    ofFeatures += [...text.matchAll(/\bcfg(?:_attr)?\([^\]]*\bfeature\b[^\]]*\)\]\n(?!(?:pub(?:\(.*\))? )?mod )/g)]
      .length
    if (lines.length > MOST_LINES) problems.push(`src/${path} has ${lines.length} lines, more than ${MOST_LINES}`)
  }
  if (cfgLines > MOST_CFG_LINES) problems.push(`src/ has ${cfgLines} lines with cfg(unix), more than ${MOST_CFG_LINES}`)
  if (ofFeatures > MOST_OF_FEATURES)
    problems.push(`src/ has ${ofFeatures} items with cfg(feature), more than ${MOST_OF_FEATURES}`)
  const [, trait = ''] = /\npub trait Engine\b[^{]*\{\n([^]*?)\n\}/.exec(product['engine/mod.rs'] ?? '') ?? []
  const methods = [...trait.matchAll(/^ {4}(?:async )?fn (\w+)[^;{]*([;{])/gm)]
  if (methods.length > MOST_METHODS) problems.push(`Engine has ${methods.length} methods, more than ${MOST_METHODS}`)
  for (const [, name, end] of methods) if (end === '{') problems.push(`Engine::${name} has a default`)
  return problems
}

/**
 * Lists the problems of a tree.
 *
 * @param {string} src
 */
export function checkStructure(src) {
  const entries = readdirSync(src, { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile())
  const files = entries.map((entry) => join(entry.parentPath ?? entry.path, entry.name))
  return problemsOf(
    Object.fromEntries(files.map((file) => [relative(src, file).split(sep).join('/'), readFileSync(file, 'utf8')])),
  )
}

/**
 * A fault that a test finds (mutants.mjs): a line of a file, which occurs once, without its indentation; what replaces it; and the test
 * that fails then, in Rust or in a spec.
 *
 * @typedef {{ name: string, file: string, line: string, becomes: string, test: string, spec?: string }} Mutant
 */

/** @param {string} root @returns {Mutant[]} */
export const readMutants = (root) => JSON.parse(readFileSync(join(root, 'scripts', 'mutants.json'), 'utf8'))

/**
 * Lists the mutants that cannot be planted, or whose test does not exist.
 *
 * @param {string} root
 * @param {Mutant[]} [mutants]
 */
export function checkMutants(root, mutants = readMutants(root)) {
  /** @param {string[]} texts @param {string} folder */
  const occurs = (texts, folder) => {
    const patterns = texts.flatMap((text) => ['-e', text])
    return spawnSync('git', ['grep', '--untracked', '-qF', ...patterns, '--', folder], { cwd: root }).status === 0
  }
  return mutants.flatMap(({ name, file, line, test, spec }) => {
    const path = join(root, file)
    const lines = existsSync(path) ? readFileSync(path, 'utf8').split('\n') : []
    const { length } = lines.filter((other) => other.trim() === line)
    // A test that runs on two servers has their name at its end.
    const [last, before] = test.split('::').reverse()
    const known = /^(replica_set|standalone)$/.test(last) ? before : last
    const isKnown = spec
      ? existsSync(join(root, spec)) && occurs([test], '__test__')
      : occurs([`fn ${known}(`, `fn ${known}<`], 'src')
    return [
      length !== 1 && `mutant "${name}": its line occurs ${length} times in ${file}, and not once`,
      !isKnown && `mutant "${name}": there is no test ${test}`,
    ].filter((problem) => problem !== false)
  })
}
