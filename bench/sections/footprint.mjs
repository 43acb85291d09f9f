// The cost of a contender before its first call: the import, and the size of its packages.
import { execFile } from 'node:child_process'
import { existsSync, lstatSync, readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { describe } from '../describe.mjs'
import { cell, spread } from '../report.mjs'
import { ALL } from './stores.mjs'

const BENCH = fileURLToPath(new URL('..', import.meta.url))
const ROOT = fileURLToPath(new URL('../..', import.meta.url))
const IMPORTS = 11

const readJson = (file) => JSON.parse(readFileSync(file, 'utf8'))

export async function footprint({ quick, chosen }) {
  const contenders = chosen(ALL.filter((name) => !/-auto$|^holdfast-/.test(name)))
  const about = Object.fromEntries(await Promise.all(contenders.map(async (name) => [name, await describe(name)])))
  /** @type {Record<string, { ms: number }[]>} */
  const results = Object.fromEntries(contenders.map((module) => [module, []]))
  // The first import of each warms the system's file cache.
  for (let round = -1; round < (quick ? 1 : IMPORTS); round++) {
    for (const module of round % 2 === 0 ? contenders : [...contenders].reverse()) {
      const ms = await importMs(module)
      if (round >= 0) results[module].push({ ms })
    }
  }
  const rows = contenders.map((module) => {
    const { packages, bytes } = module === 'holdfast' ? own() : installed(about[module].packages)
    return { module, with: about[module].packages, importMs: spread(results[module], 'ms'), packages, bytes }
  })
  return {
    fields: [],
    names: contenders,
    markdown: markdown(rows),
    data: Object.fromEntries(rows.map(({ module, ...row }) => [module, row])),
  }
}

async function importMs(module) {
  const { stdout } = await promisify(execFile)(process.execPath, [join(BENCH, 'import-time.mjs'), module])
  return Number(stdout)
}

/** Measures holdfast as npm packs it, with the addon of this platform, which is a separate package. */
function own() {
  const addon = process.env.NAPI_RS_NATIVE_LIBRARY_PATH ?? localAddon()
  const { files } = readJson(join(ROOT, 'package.json'))
  const packed = ['package.json', 'README.md', 'LICENSE', ...files].map((file) => join(ROOT, file))
  return { packages: 2, bytes: [addon, ...packed].reduce((sum, file) => sum + sizeAt(file), 0) }
}

function localAddon() {
  const name = readdirSync(ROOT).find((file) => /^holdfast\..*\.node$/.test(file))
  if (!name) throw new Error('there is no addon next to index.js')
  return join(ROOT, name)
}

/** Counts the packages that `names` depend on in node_modules, and their sizes, each package once. */
function installed(names) {
  const seen = new Set()
  const visit = (name, from, isNeeded) => {
    const folder = find(name, from)
    if (!folder && isNeeded) throw new Error(`${name} is not installed for ${from}`)
    if (!folder || seen.has(folder)) return
    seen.add(folder)
    const { dependencies = {}, optionalDependencies = {} } = readJson(join(folder, 'package.json'))
    // npm lists optional dependencies among the others, too; those of other platforms are not installed.
    for (const next of Object.keys(dependencies)) visit(next, folder, !(next in optionalDependencies))
    for (const next of Object.keys(optionalDependencies)) visit(next, folder, false)
  }
  for (const name of names) visit(name, BENCH, true)
  return { packages: seen.size, bytes: [...seen].reduce((sum, folder) => sum + sizeOf(folder), 0) }
}

/** Finds the folder of a package as Node does: in `folder`, or in a folder above it. */
function find(name, folder) {
  const here = join(folder, 'node_modules', name)
  if (existsSync(join(here, 'package.json'))) return here
  return folder.length <= BENCH.length ? undefined : find(name, join(folder, '..'))
}

/** Sums the sizes of a package's files, without nested packages. */
function sizeOf(folder) {
  return readdirSync(folder, { withFileTypes: true }).reduce((sum, entry) => {
    if (entry.name === 'node_modules') return sum
    return sum + sizeAt(join(folder, entry.name))
  }, 0)
}

const sizeAt = (path) => (lstatSync(path).isDirectory() ? sizeOf(path) : lstatSync(path).size)

function markdown(rows) {
  return [
    '## Import and installed size',
    '',
    `The time of the first \`import\` in a new process with cached files, ${IMPORTS} times. The packages that npm installs ` +
      'with the driver, and the sum of their file sizes; for holdfast, its package and the package of the platform.',
    '',
    '| | import, ms | packages | size, MiB |',
    '|---|---:|---:|---:|',
    ...rows.map(
      ({ module, with: names, importMs, packages, bytes }) =>
        `| ${module}${names.length > 1 ? ` (with ${names.slice(1).join(', ')})` : ''} | ${cell(importMs, 1)} | ${packages} | ${(bytes / 2 ** 20).toFixed(2)} |`,
    ),
    '',
  ].join('\n')
}
