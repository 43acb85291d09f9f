// Builds the addon (the `.node` file and its types, `lib/addon.d.ts`) and compiles `lib/` to `dist/`, `index.d.ts`, `testing.d.ts` and
// `otel.d.ts`. Passes its arguments to `napi build`, for example `--release`, except for two: `--pgo` creates a profile first
// (pgo.mjs), and `--ts` compiles `lib/` only.
import { execFileSync, spawnSync } from 'node:child_process'
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { join, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { writeApi } from './api.mjs'
import { commandOf, installDependencies, requireRust } from './setup.mjs'

process.chdir(fileURLToPath(new URL('..', import.meta.url)))
const given = process.argv.slice(2)
const rest = given.filter((argument) => argument !== '--pgo' && argument !== '--ts')
const onlyTypeScript = given.includes('--ts')
const hasProfile = given.includes('--pgo')
if (!onlyTypeScript) requireRust()
installDependencies()

if (hasProfile) {
  const { hostTarget, profile } = await import('./pgo.mjs')
  // The profile is valid for the target that napi passes to cargo, and for no other.
  const { values } = parseArgs({
    args: rest,
    options: { target: { type: 'string', short: 't', default: hostTarget } },
    strict: false,
  })
  process.env.RUSTFLAGS = [process.env.RUSTFLAGS, await profile(values.target)].filter(Boolean).join(' ')
}
const startedAt = Date.now()
const args = ['build', '--platform', '--no-js', '--dts', 'lib/addon.d.ts', '--no-dts-header', ...rest]
if (!onlyTypeScript) {
  const { status } = spawnSync(process.execPath, [commandOf('@napi-rs/cli', 'napi'), ...args], { stdio: 'inherit' })
  if (status !== 0) {
    // cargo has printed the cause; a stack trace of this script would hide it.
    console.error('The addon was not built: the lines above show the cause.')
    process.exit(1)
  }
}
if (hasProfile) {
  const { checkSize } = await import('./pgo.mjs')
  const built = readdirSync('.').filter(
    (file) => /^holdfast\..*\.node$/.test(file) && statSync(file).mtimeMs >= startedAt,
  )
  if (built.length !== 1)
    throw new Error(`the size cannot be checked: the build must write one addon and wrote ${built.length} (${built})`)
  checkSize(built[0])
}
await compile()

/**
 * Compiles `lib/`: one JavaScript file (a file for each module takes twice as long to import), one file of declarations, its page in
 * docs/, and the folders that bundlers read (one for each platform; its `main` is the addon in the package of that platform).
 */
async function compile() {
  mkdirSync('target', { recursive: true })
  const compiled = mkdtempSync('target/lib-')
  execFileSync(process.execPath, [commandOf('typescript', 'tsc'), '-p', 'tsconfig.json', '--outDir', compiled], {
    stdio: 'inherit',
  })
  /** @param {string} name */
  const declarations = (name) =>
    readFileSync(join(compiled, `${name}.d.ts`), 'utf8').replaceAll(/^( {4})+/gm, (indent) =>
      indent.slice(indent.length / 2),
    )
  const emitted = ['errors', 'lock', 'named', 'election', 'service'].map(declarations)
  // Without `#private`, TypeScript compares a class by its members: a unit test may use an object literal instead.
  const notPublic = /^(import|export) .*from .*\n|^export \{\};?\n|^ {2}#private;\n|^declare .*\n|^type .*\n/gm
  const classes = emitted.map((part) => part.replace(notPublic, ''))
  writeFileSync(
    'index.d.ts',
    [readFileSync('lib/types.ts', 'utf8'), ...classes].map((part) => `${part.trim()}\n`).join('\n'),
  )
  for (const name of ['testing', 'otel'])
    writeFileSync(`${name}.d.ts`, declarations(name).replaceAll(/'\.\/(service|types)\.js'/g, "'./index.js'"))
  writeApi()
  const { rollup } = await import('@rollup/wasm-node')
  for (const name of ['index', 'otel']) {
    const external = [/^node:/, '@opentelemetry/api', ...(name === 'index' ? [] : [resolve(compiled, 'index.js')])]
    const bundle = await rollup({ input: join(compiled, `${name}.js`), external })
    await bundle.write({ file: `dist/${name}.js`, format: 'cjs' })
  }
  rmSync(compiled, { recursive: true })
  for (const platform of readdirSync('npm')) {
    mkdirSync(`dist/addons/${platform}`, { recursive: true })
    writeFileSync(
      `dist/addons/${platform}/package.json`,
      `{ "main": "../../../../holdfast-${platform}/holdfast.${platform}.node" }\n`,
    )
    writeFileSync(`dist/addons/${platform}/index.js`, '')
  }
}
