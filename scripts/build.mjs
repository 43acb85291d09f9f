// Builds the addon: the `.node` file, `native.js` (the loader that napi generates) and `index.d.ts`. Arguments go to
// `napi build`, for instance `--release`; but `--pgo` is for this script, and has a profile made first (pgo.mjs).
import { execFileSync } from 'node:child_process'
import { readFileSync, writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { installDependencies } from './setup.mjs'

process.chdir(fileURLToPath(new URL('..', import.meta.url)))
installDependencies()

const cli = 'node_modules/@napi-rs/cli/dist/cli.js'
const asked = process.argv.slice(2)
const rest = asked.filter((argument) => argument !== '--pgo')
if (rest.length < asked.length) {
  const { hostTarget, profile } = await import('./pgo.mjs')
  // napi names the target to cargo, too: a profile is good for no other.
  const { values } = parseArgs({ args: rest, options: { target: { type: 'string', short: 't', default: hostTarget } }, strict: false })
  process.env.RUSTFLAGS = [process.env.RUSTFLAGS, await profile(values.target)].filter(Boolean).join(' ')
}
const args = ['build', '--platform', '--js', 'native.js', '--dts', 'index.d.ts', ...rest]
execFileSync(process.execPath, [cli, ...args], { stdio: 'inherit' })

// The types stand in src/js/types.d.ts; napi adds the classes that exist at run time. Two things it cannot know: which
// artifact was loaded is no part of this package's API, and neither class can be made with `new`.
let types = readFileSync('index.d.ts', 'utf8')
types = types.replace(/\/\*\*(?:(?!\*\/)[\s\S])*\*\/\nexport declare const __napiBindingTarget[^\n]*\n+/, '')
types = types.replace(/^(export declare class \w+) \{\}$/gm, '$1 {\n  private constructor()\n}')
writeFileSync('index.d.ts', types)
