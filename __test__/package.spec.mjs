// The package as a user gets it: packed, installed in an empty folder, loaded through the platform's package.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import {
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs'
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
  const esm = `
import { LockService, Lock } from 'holdfast'
import { createTestLocks } from 'holdfast/testing'
const { locks, close } = await createTestLocks()
await close()
console.log(typeof Lock, locks instanceof LockService)`
  const command = join(target, 'node_modules', '.bin', 'holdfast')
  const env = { ...process.env, HOLDFAST_URL: `sqlite:${join(target, 'locks.sqlite')}` }
  const ran = await run(command, ['run', 'report', '--', 'sh', '-c', 'echo "$HOLDFAST_NAME"'], { env })
  assert.equal(ran.stdout.trim(), 'report')
  const { stdout: named } = await run(process.execPath, ['--input-type=module', '-e', esm], { cwd: target })
  assert.equal(named.trim(), 'function true')
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

test(
  'an addon that is there and does not load is named, with the reason of the system',
  { skip: unavailable },
  async () => {
    const target = await install('broken', [await pack(root)])
    const load = () =>
      run(process.execPath, ['-e', "require('holdfast')"], { cwd: target }).then(
        () => assert.fail('it loaded a broken addon'),
        (error) => error.stderr,
      )
    // The package of the other C library comes first, or after the one that is missing.
    for (const [name, reason] of [
      ['linux-x64-musl', 'file too short'],
      ['linux-x64-gnu', 'invalid ELF header'],
    ]) {
      const own = join(target, 'node_modules', `holdfast-${name}`)
      mkdirSync(own)
      writeFileSync(join(own, `holdfast.${name}.node`), reason === 'file too short' ? 'x' : 'x'.repeat(10_000))
      const failed = await load()
      assert.match(
        failed,
        new RegExp(`Error: the native addon of holdfast does not load \\(.*${name}\\.node.*${reason}`),
      )
      assert.match(failed, /: install it again on this system, with its optional dependencies/)
      assert.doesNotMatch(failed, /Error: holdfast has no native addon/)
    }
  },
)

test('the package has no install scripts and no dependencies', () => {
  const { scripts, dependencies } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'))
  for (const hook of ['preinstall', 'install', 'postinstall', 'prepare']) assert.equal(scripts[hook], undefined, hook)
  assert.equal(dependencies, undefined)
})

test('an import reads two files of JavaScript and the addon, and both entry points have the same classes', async () => {
  const code = `
const { LockService, Lock, LockError } = require('holdfast')
const own = Object.keys(require.cache).filter((file) => !file.endsWith('.node'))
console.log(own.length, LockService.name, Lock.name, LockError.name)
require('holdfast/testing').createTestLocks().then(async ({ locks, close }) => {
  console.log(locks instanceof LockService, (await locks.acquire('n')) instanceof Lock)
  await close()
})`
  const { stdout } = await run(process.execPath, ['-e', code], { cwd: root })
  assert.equal(stdout, '2 LockService Lock LockError\ntrue true\n')
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

test('package.json has what a registry and a resolver need', () => {
  const manifest = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'))
  for (const field of ['author', 'license', 'description', 'keywords', 'type', 'exports'])
    assert.ok(manifest[field], field)
  assert.deepEqual(manifest.exports['.'], { types: `./${manifest.types}`, default: `./${manifest.main}` })
  for (const [subpath, target] of Object.entries(manifest.exports)) {
    for (const file of typeof target === 'string' ? [target] : Object.values(target)) {
      assert.ok(existsSync(join(root, file)), `${subpath}: ${file}`)
    }
  }
})

test('holdfast-nest has the version of holdfast, and asks for it', () => {
  const [own, nest] = ['', 'packages/nest/'].map((folder) =>
    JSON.parse(readFileSync(join(root, `${folder}package.json`), 'utf8')),
  )
  assert.equal(nest.version, own.version)
  assert.equal(nest.peerDependencies.holdfast, `^${own.version}`)
})

test('every action is pinned by a commit, and the workflows use no secret', () => {
  const folder = join(root, '.github', 'workflows')
  const files = readdirSync(folder)
  assert.ok(files.length > 1)
  for (const file of files) {
    const text = readFileSync(join(folder, file), 'utf8')
    assert.doesNotMatch(text, /secrets\.|_authToken|NODE_AUTH_TOKEN/, file)
    for (const [, action] of text.matchAll(/\buses: (.*)/g)) {
      if (!action.startsWith('./'))
        assert.match(action, /^[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$/, `${file}: ${action}`)
    }
  }
  const publish = readFileSync(join(folder, 'release.yml'), 'utf8').split('\n  publish:\n')[1]
  assert.match(publish, /id-token: write/)
  for (const folder of ['', 'packages/nest/']) {
    const field = (name) => `test "$(node -p "require('./${folder}package.json').${name}`
    assert.ok(publish.includes(field('repository')), 'refuses without a repository')
  }
  assert.match(publish, /npm publish --access public\n +npm publish \.\/packages\/nest --access public/)
  assert.match(publish, /NPM_CONFIG_PROVENANCE: 'true'/)
})
