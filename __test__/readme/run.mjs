// Runs a document's JavaScript and TypeScript in a project with `holdfast` in node_modules, and with the functions and collections
// that the examples assume (scaffold.mjs).
import { execFile } from 'node:child_process'
import { cpSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { root } from './blocks.mjs'

const SCAFFOLD = new URL('scaffold.mjs', import.meta.url).href
const TIMEOUT_MS = 60_000

/** Returns the files of a subpath of the package, or `undefined`. */
function subpathOf(subpath) {
  const found = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8')).exports?.[subpath]
  return found && existsSync(join(root, found.default)) ? found : undefined
}

/** A temporary project folder. */
export class Project {
  #modules = 0

  constructor() {
    this.folder = mkdtempSync(join(tmpdir(), 'holdfast-test-'))
    const own = join(this.folder, 'node_modules', 'holdfast')
    mkdirSync(own, { recursive: true })
    writeFileSync(join(this.folder, 'package.json'), '{ "type": "module" }')
    const exports = { '.': { types: './index.d.ts', default: './index.js' } }
    for (const name of ['testing', 'otel']) {
      const subpath = subpathOf(`./${name}`)
      if (!subpath) continue
      exports[`./${name}`] = { types: `./${name}.d.ts`, default: `./${name}.js` }
      const path = JSON.stringify(join(root, subpath.default))
      writeFileSync(join(own, `${name}.js`), `module.exports = require(${path})\n`)
      // It imports its types from here.
      writeFileSync(join(own, `${name}.d.ts`), readFileSync(join(root, subpath.types), 'utf8'))
    }
    writeFileSync(join(own, 'package.json'), JSON.stringify({ name: 'holdfast', exports }))
    const nest = join(this.folder, 'node_modules', 'holdfast-nest')
    for (const file of ['package.json', 'index.js', 'index.d.ts'])
      cpSync(join(root, 'packages', 'nest', file), join(nest, file))
    cpSync(join(root, 'index.d.ts'), join(own, 'index.d.ts'))
    cpSync(fileURLToPath(new URL('installed.cjs', import.meta.url)), join(own, 'index.js'))
    cpSync(fileURLToPath(new URL('distributed-locks.mjs', import.meta.url)), join(this.folder, 'distributed-locks.js'))
    for (const file of ['scaffold.d.ts', 'packages.d.ts']) {
      cpSync(fileURLToPath(new URL(file, import.meta.url)), join(this.folder, file))
    }
  }

  /** Adds packages to `node_modules` that are installed in a folder of this project. */
  alsoHas(folder, ...packages) {
    for (const name of packages) {
      const path = join(this.folder, 'node_modules', name)
      mkdirSync(dirname(path), { recursive: true })
      symlinkSync(join(root, folder, 'node_modules', name), path, 'junction')
    }
  }

  close() {
    rmSync(this.folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 })
  }

  /** Runs a module `times` times in one process. Resolves to its output and its effects. */
  async js(code, { times = 1, env = {} } = {}) {
    const file = join(this.folder, `block-${++this.#modules}.js`)
    writeFileSync(file, code)
    return this.#start(file, times, env)
  }

  /** Runs both versions of a diff. Resolves to the effects of each. */
  async diff(code, options) {
    const lines = code.split('\n')
    for (const line of lines) if (!/^([ +-]|$)/.test(line)) throw new Error(`not a line of a diff: ${line}`)
    const sides = {}
    for (const [side, own, other] of [
      ['before', '-', '+'],
      ['after', '+', '-'],
    ]) {
      const kept = lines.filter((line) => !line.startsWith(other))
      const text = kept.map((line) => line.replace(own, ' ').slice(1)).join('\n')
      await this.check(text)
      sides[side] = await this.js(text, options)
    }
    return sides
  }

  /** Checks the syntax alone. */
  async check(code) {
    const file = join(this.folder, `checked-${++this.#modules}.js`)
    writeFileSync(file, code)
    await node(['--check', file], this.folder, {})
  }

  /** Compiles modules strictly, all at once: the compiler takes longer to start than for one. Resolves to the errors and the JavaScript file of each. */
  async compile(codes) {
    const names = codes.map(() => `block-${++this.#modules}`)
    // A block without an import is a module, too.
    for (const [index, name] of names.entries())
      writeFileSync(join(this.folder, `${name}.ts`), `${codes[index]}export {}\n`)
    const compiler = join(root, 'node_modules', 'typescript', 'bin', 'tsc')
    const language = ['--strict', '--noUncheckedIndexedAccess', '--target', 'es2022', '--module', 'nodenext']
    const decorators = ['--experimentalDecorators', '--skipLibCheck']
    const types = ['--lib', 'es2022', '--types', 'node', '--typeRoots', join(root, 'node_modules', '@types')]
    const files = [...names.map((name) => `${name}.ts`), 'scaffold.d.ts', 'packages.d.ts']
    const found = await node([compiler, ...language, ...decorators, ...types, ...files], this.folder, {}).then(
      () => '',
      ({ message }) => message,
    )
    const lines = found.split('\n')
    return names.map((name) => {
      const errors = lines.filter(
        (line) => /\berror TS/.test(line) && (line.startsWith(`${name}.ts`) || !line.startsWith('block-')),
      )
      const file = join(this.folder, `${name}.js`)
      return { errors, file, code: errors.length > 0 ? '' : readFileSync(file, 'utf8') }
    })
  }

  async #start(file, times, env) {
    // One file per run: several runs are concurrent.
    const report = join(this.folder, `report-${++this.#modules}.json`)
    const own = { README_FILE: file, README_TIMES: String(times), README_REPORT: report, README_ROOT: root, ...env }
    const code = `await import(${JSON.stringify(SCAFFOLD)})`
    const output = await node(['--input-type=module', '-e', code], this.folder, own)
    return { ...output, did: JSON.parse(readFileSync(report, 'utf8')) }
  }
}

/** Runs Node. Rejects on an exit status other than 0, and on any output to stderr. */
export function node(args, cwd, env) {
  return new Promise((resolve, reject) => {
    const options = { cwd, env: { ...process.env, ...env }, timeout: TIMEOUT_MS }
    execFile(process.execPath, args, options, (error, stdout, stderr) => {
      if (error) reject(new Error(`${stdout}${stderr || error.message}`))
      else if (stderr) reject(new Error(`it printed to stderr: ${stderr}`))
      else resolve({ stdout })
    })
  })
}
