// The package as a user gets it: packed, installed in an empty folder, loaded through the platform's package.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { cpSync, existsSync, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const run = promisify(execFile)
const root = fileURLToPath(new URL('..', import.meta.url))
const platform = 'linux-x64-gnu'
const addon = `holdfast.${platform}.node`
const unavailable = existsSync(join(root, addon)) ? false : `this machine builds no ${addon}`

let folder

/** Packs a folder. Returns the path of the tarball. */
async function pack(source) {
  const { stdout } = await run('npm', ['pack', '--json', '--pack-destination', folder], { cwd: source })
  const packed = JSON.parse(stdout)
  return join(folder, (Array.isArray(packed) ? packed[0] : Object.values(packed)[0]).filename)
}

/** Installs tarballs in an empty folder, without a registry. */
async function install(name, tarballs) {
  const target = mkdtempSync(join(folder, `${name}-`))
  writeFileSync(join(target, 'package.json'), '{ "private": true }')
  await run('npm', ['install', '--offline', '--no-audit', '--no-fund', ...tarballs], { cwd: target })
  return target
}

const LOADS = `
const { LockService } = require('holdfast')
LockService.connect('memory:').then(async (locks) => {
  await using(locks)
  console.log('works', require.resolve('holdfast-${platform}/package.json').includes('node_modules'))
})
async function using(locks) { if (await locks.using('n', (lock) => lock.isHeld) !== true) throw new Error('not held') }
`

before(() => {
  folder = mkdtempSync(join(tmpdir(), 'holdfast-package-'))
})
after(() => rmSync(folder, { recursive: true, force: true }))

test('the package loads and locks when its platform package is installed', { skip: unavailable }, async () => {
  const own = await pack(root)
  assert.ok(statSync(own).size < 100_000, `the tarball has ${statSync(own).size} bytes`)
  const platformFolder = join(folder, 'platform')
  cpSync(join(root, 'npm', platform), platformFolder, { recursive: true })
  cpSync(join(root, addon), join(platformFolder, addon))
  const target = await install('whole', [own, await pack(platformFolder)])
  const { stdout } = await run(process.execPath, ['-e', LOADS], { cwd: target })
  assert.equal(stdout.trim(), 'works true')
  const esm = "import { LockService, Lock } from 'holdfast'; console.log(typeof LockService.connect, typeof Lock)"
  const { stdout: named } = await run(process.execPath, ['--input-type=module', '-e', esm], { cwd: target })
  assert.equal(named.trim(), 'function function')
})

test('without its platform package the error says what is missing and how to build it', async () => {
  const target = await install('bare', [await pack(root)])
  const failed = await run(process.execPath, ['-e', "require('holdfast')"], { cwd: target }).then(
    () => assert.fail('it loaded without an addon'),
    (error) => error.stderr,
  )
  assert.match(
    failed,
    /Error: holdfast has no native addon for \S+ here: install .*, or build it .* `npm run build`, which needs Rust\./,
  )
})

test('the package has no install scripts and no dependencies', () => {
  const { scripts, dependencies } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'))
  for (const hook of ['preinstall', 'install', 'postinstall', 'prepare']) assert.equal(scripts[hook], undefined, hook)
  assert.equal(dependencies, undefined)
})

test('every target has a platform package', () => {
  const { napi, version } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'))
  const names = {
    'x86_64-unknown-linux-gnu': 'linux-x64-gnu',
    'x86_64-unknown-linux-musl': 'linux-x64-musl',
    'aarch64-unknown-linux-gnu': 'linux-arm64-gnu',
    'aarch64-unknown-linux-musl': 'linux-arm64-musl',
    'x86_64-apple-darwin': 'darwin-x64',
    'aarch64-apple-darwin': 'darwin-arm64',
    'x86_64-pc-windows-msvc': 'win32-x64-msvc',
  }
  assert.deepEqual([...napi.targets].sort(), Object.keys(names).sort())
  for (const name of Object.values(names)) {
    const own = JSON.parse(readFileSync(join(root, 'npm', name, 'package.json'), 'utf8'))
    assert.equal(own.name, `holdfast-${name}`)
    assert.equal(own.version, version)
    assert.equal(own.main, `holdfast.${name}.node`)
  }
})
