// What a contender costs before it does anything: its import, and what npm lays on the disk for it.
import { execFile } from 'node:child_process'
import { existsSync, lstatSync, readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { cell, spread } from '../report.mjs'
import { ALL } from './stores.mjs'

const BENCH = fileURLToPath(new URL('..', import.meta.url))
const ROOT = fileURLToPath(new URL('../..', import.meta.url))
const CONTENDERS = ALL.filter((module) => !module.endsWith('-auto') && !module.startsWith('holdfast-'))
const IMPORTS = 11

const readJson = (file) => JSON.parse(readFileSync(file, 'utf8'))

export async function footprint({ quick, about }) {
  const results = Object.fromEntries(CONTENDERS.map((module) => [module, []]))
  // The first import of each warms the system's file cache.
  for (let round = -1; round < (quick ? 1 : IMPORTS); round++) {
    for (const module of round % 2 === 0 ? CONTENDERS : [...CONTENDERS].reverse()) {
      const ms = await importMs(module)
      if (round >= 0) results[module].push({ ms })
    }
  }
  const rows = CONTENDERS.map((module) => {
    const { packages, bytes } = module === 'holdfast' ? own() : installed(about[module].packages)
    return { module, with: about[module].packages, importMs: spread(results[module], 'ms'), packages, bytes }
  })
  return { fields: [], markdown: markdown(rows), data: Object.fromEntries(rows.map(({ module, ...row }) => [module, row])) }
}

async function importMs(module) {
  const { stdout } = await promisify(execFile)(process.execPath, [join(BENCH, 'import-time.mjs'), module])
  return Number(stdout)
}

/** holdfast as npm packs it, with the addon of this platform, which is a package of its own. */
function own() {
  const addon = process.env.NAPI_RS_NATIVE_LIBRARY_PATH ?? localAddon()
  const { files } = readJson(join(ROOT, 'package.json'))
  const packed = ['package.json', 'README.md', 'LICENSE', ...files].map((file) => join(ROOT, file))
  return { packages: 2, bytes: [addon, ...packed].reduce((sum, file) => sum + sizeAt(file), 0) }
}

function localAddon() {
  const name = readdirSync(ROOT).find((file) => /^holdfast\..*\.node$/.test(file))
  if (!name) throw new Error('there is no addon beside index.js')
  return join(ROOT, name)
}

/** The packages that `names` bring along, as they lie in node_modules: how many, and how large without each other. */
function installed(names) {
  const seen = new Set()
  const visit = (name, from, isNeeded) => {
    const folder = find(name, from)
    if (!folder && isNeeded) throw new Error(`${name} is not installed for ${from}`)
    if (!folder || seen.has(folder)) return
    seen.add(folder)
    const { dependencies = {}, optionalDependencies = {} } = readJson(join(folder, 'package.json'))
    // npm lists the optional ones among the others, too, and those of other platforms are not there.
    for (const next of Object.keys(dependencies)) visit(next, folder, !(next in optionalDependencies))
    for (const next of Object.keys(optionalDependencies)) visit(next, folder, false)
  }
  for (const name of names) visit(name, BENCH, true)
  return { packages: seen.size, bytes: [...seen].reduce((sum, folder) => sum + sizeOf(folder), 0) }
}

/** Where Node finds `name` from `folder`: there, or in a folder above it. */
function find(name, folder) {
  const here = join(folder, 'node_modules', name)
  if (existsSync(join(here, 'package.json'))) return here
  return folder.length <= BENCH.length ? undefined : find(name, join(folder, '..'))
}

/** What one package's own files take, those of packages inside of it apart. */
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
    `The time of the first \`import\` in a fresh process, files in the system's cache, ${IMPORTS} times. The packages that npm ` +
      'installs, driver included, and what their files take together; for holdfast, its package and that of the platform.',
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
