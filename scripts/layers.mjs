// Checks the layers of docs/ARCHITECTURE.md: the imports that are forbidden in each layer, found by patterns.
import { readdirSync, readFileSync } from 'node:fs'
import { join, relative, sep } from 'node:path'

const engines = {
  redis: 'redis',
  mongodb: 'mongodb',
  sql: 'sqlx|tokio_postgres|tokio_postgres_rustls',
  etcd: 'h2|prost',
  zookeeper: '',
}

/**
 * Returns the forbidden patterns of a file, by its path below `src/`.
 *
 * @param {string} path
 * @returns {[RegExp, string][]}
 */
function forbidden(path) {
  /** @type {[RegExp, string][]} */
  const rules = []
  const [top, second] = path.split('/')
  if (top !== 'js' && path !== 'lib.rs') rules.push([/\bnapi(_derive)?(::|\b.*;)/, 'napi belongs to js/ and lib.rs'])
  for (const [engine, driver] of Object.entries(engines)) {
    if (!driver || path.startsWith(`engine/${engine}/`)) continue
    // The lookbehind excludes our own modules `super::redis::…` and `crate::engine::redis::…`.
    rules.push([new RegExp(`(?<![\\w:])(::)?(${driver})::`), `the driver ${driver} belongs to engine/${engine}/`])
  }
  if (top === 'engine' && second in engines) {
    const siblings = ['memory', ...Object.keys(engines)].filter((name) => name !== second).join('|')
    rules.push([new RegExp(`\\bengine::(${siblings})\\b`), 'an engine imports no other engine'])
    rules.push([/\bcrate::(service|js)\b/, 'an engine imports no layer above it'])
  }
  const inTests = path.startsWith('service/tests/')
  if (top === 'service' && !inTests) {
    rules.push([
      /\bengine::(memory|redis|mongodb|sql|etcd|zookeeper|entries|config)\b/,
      'the service imports the trait, not the engines',
    ])
    rules.push([/\bcrate::js\b/, 'the service imports no layer above it'])
  }
  if (top === 'js') {
    rules.push([
      /\bengine::(memory|redis|mongodb|sql|etcd|zookeeper|entries|Engine|Acquired|Renewed|Released)\b/,
      'js/ imports of L1 only the configuration',
    ])
  }
  if (/^(error|model|process|share|clock|backoff|event_loop|stall_detector)\.rs$/.test(path)) {
    rules.push([/\bcrate::(engine|service|js)\b/, 'L0 imports no layer above it'])
  }
  return rules
}

/**
 * Lists the violations in one file.
 *
 * @param {string} path
 * @param {string} text
 */
export function violations(path, text) {
  const code = text.split('\n').map((line) => line.replace(/\/\/.*$/, ''))
  return forbidden(path).flatMap(([pattern, why]) =>
    code.flatMap((line, i) => (pattern.test(line) ? [`src/${path}:${i + 1}: ${why}: ${line.trim()}`] : [])),
  )
}

/**
 * Lists the violations in a tree.
 *
 * @param {string} src
 */
export function checkLayers(src) {
  return readdirSync(src, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile() && entry.name.endsWith('.rs'))
    .flatMap((entry) => {
      const file = join(entry.parentPath ?? entry.path, entry.name)
      return violations(relative(src, file).split(sep).join('/'), readFileSync(file, 'utf8'))
    })
}

/** Lock semantics belong to the native core: the surface in TypeScript has no timers and reads no clock. */
const CLOCKS = /\b(setTimeout|setInterval|setImmediate|performance|hrtime|uptime|Date)\b/
/** Where the time of a store becomes a value of the API, and the type of that value. */
const NO_CLOCKS = /\bnew Date\(holder\.since\)|\bsince: Date\b/g

/**
 * Lists the violations in one file of `lib/`.
 *
 * @param {string} path
 * @param {string} text
 */
export function surfaceViolations(path, text) {
  const code = text.replaceAll(/\/\*[\s\S]*?\*\//g, (comment) => comment.replaceAll(/[^\n]/g, '')).split('\n')
  return code.flatMap((line, i) => {
    const rest = line.replace(/\/\/ .*$/, '').replaceAll(NO_CLOCKS, '')
    return CLOCKS.test(rest)
      ? [`lib/${path}:${i + 1}: timers and clocks belong to the native core: ${line.trim()}`]
      : []
  })
}

/**
 * Lists the violations in `lib/`.
 *
 * @param {string} lib
 */
export function checkSurface(lib) {
  const files = readdirSync(lib).filter((file) => file.endsWith('.ts'))
  return files.flatMap((file) => surfaceViolations(file, readFileSync(join(lib, file), 'utf8')))
}
