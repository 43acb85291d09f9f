// index.d.ts is exact: it compiles under `strict` with and without the DOM library and @types/node.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { copyFile, mkdir, mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { dirname, join, resolve } from 'node:path'
import { describe, it } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { LockService } from '../index.js'

const root = fileURLToPath(new URL('..', import.meta.url))
const folder = join(root, '__test__', 'types')
const manifest = createRequire(import.meta.url).resolve('typescript/package.json')
const { bin } = JSON.parse(await readFile(manifest, 'utf8'))
const tsc = join(dirname(manifest), bin.tsc)

const strict = {
  strict: true,
  noUncheckedIndexedAccess: true,
  noImplicitOverride: true,
  noPropertyAccessFromIndexSignature: true,
  // The test checks the package's own declarations.
  skipLibCheck: false,
  noEmit: true,
  module: 'nodenext',
  moduleResolution: 'nodenext',
  typeRoots: [join(root, 'node_modules', '@types')],
}

async function inFolder(body) {
  const temp = await mkdtemp(join(tmpdir(), 'holdfast-types-'))
  try {
    return await body(temp)
  } finally {
    await rm(temp, { recursive: true, force: true })
  }
}

/** Compiles files with these options. Returns the compiler's messages. */
const compile = (files, options) =>
  // In a new folder, so that the compiler finds no other configuration in a parent folder.
  inFolder(async (temp) => {
    const project = join(temp, 'tsconfig.json')
    const compilerOptions = { ...strict, ...options }
    await writeFile(project, JSON.stringify({ compilerOptions, files: files.map((file) => resolve(folder, file)) }))
    return await new Promise((settle) => {
      const argv = [tsc, '-p', project, '--pretty', 'false']
      execFile(process.execPath, argv, { cwd: temp, timeout: 120_000 }, (error, stdout) => {
        settle({ status: error ? (error.code ?? error.signal) : 0, stdout: stdout.trim() })
      })
    })
  })

const compiles = async (files, options) => assert.deepEqual(await compile(files, options), { status: 0, stdout: '' })

// `await using` needs types that ES2022 does not have. index.d.ts declares them.
/** @type {Record<string, [Record<string, unknown>, string]>} */
const configurations = {
  'ES2022 alone': [{ target: 'es2022', lib: ['es2022'], types: [] }, 'signals-none.ts'],
  'with the DOM': [{ target: 'es2022', lib: ['es2022', 'dom'], types: [] }, 'signals-platform.ts'],
  'with @types/node': [{ target: 'es2022', lib: ['es2022'], types: ['node'] }, 'signals-platform.ts'],
  'with everything': [{ target: 'esnext', lib: ['esnext', 'dom'], types: ['node'] }, 'signals-platform.ts'],
}

const [withNode] = configurations['with @types/node']

describe('types', { concurrency: 2 }, () => {
  for (const [name, [options, signals]] of Object.entries(configurations)) {
    it(`valid code compiles: ${name}`, () => compiles(['usage.ts', 'testing.ts', signals], options))
    it(`mistakes are rejected: ${name}`, () => compiles(['mistakes.ts'], options))
  }

  it('an absent option may be undefined under exactOptionalPropertyTypes', () => {
    return compiles(['exact.ts', 'usage.ts', 'testing.ts'], { ...withNode, exactOptionalPropertyTypes: true })
  })

  it('a bundler’s resolution changes nothing', () => {
    const bundler = { module: 'esnext', moduleResolution: 'bundler', verbatimModuleSyntax: true, isolatedModules: true }
    return compiles(['usage.ts', 'testing.ts', 'signals-platform.ts'], { ...withNode, ...bundler })
  })

  it('installed, it is imported by name from ES modules and from CommonJS', () =>
    inFolder(async (temp) => {
      const installed = join(temp, 'node_modules', 'holdfast')
      await mkdir(installed, { recursive: true })
      for (const file of ['package.json', 'index.d.ts', 'testing.d.ts'])
        await copyFile(join(root, file), join(installed, file))
      const named = `import { LockService, type Lock } from 'holdfast'\nexport type L = Lock\n`
      const testing = `import { createTestLocks } from 'holdfast/testing'\nexport const made = createTestLocks()\n`
      const imports = {
        'named.mts': named,
        'whole.mts': `import holdfast from 'holdfast'\nconst { LockService } = holdfast\n`,
        'named.cts': named,
        'whole.cts': `import holdfast = require('holdfast')\nconst { LockService } = holdfast\n`,
        'testing.mts': `${named}${testing}`,
        'testing.cts': `${named}${testing}`,
      }
      for (const [file, text] of Object.entries(imports)) {
        const use = `export const isFree: Promise<boolean> = LockService.connect().then((locks) => locks.acquireLock('n'))\n`
        await writeFile(join(temp, file), text + use)
      }
      await compiles(
        Object.keys(imports).map((file) => join(temp, file)),
        withNode,
      )
    }))

  it('await using releases at the end of its block, down-levelled by the compiler', () =>
    inFolder(async (temp) => {
      const file = join(temp, 'block.mts')
      await writeFile(
        file,
        `
        import { LockService } from '${root}index.js'
        const [locks, other] = [await LockService.connect('memory:'), await LockService.connect('memory:')]
        const held = async () => (await other.inspect('x')) !== null
        const seen: boolean[] = []
        {
          await using lock = await locks.acquire('x')
          seen.push(lock.isHeld, await held())
        }
        seen.push(await held())
        try {
          await using lock = await locks.tryAcquire('x')
          await using busy = await other.tryAcquire('x')
          seen.push(lock !== null, busy === null)
          throw new Error('from the block')
        } catch (error) {
          seen.push((error as Error).message === 'from the block')
        }
        seen.push(await held())
        console.log(seen.join())
        await Promise.all([locks.close(), other.close()])`,
      )
      await compiles([file], { ...withNode, noEmit: false })
      const { stdout } = await promisify(execFile)(process.execPath, [file.replace('.mts', '.mjs')])
      assert.equal(stdout.trim(), 'true,true,false,true,true,true,false')
    }))

  it('the compiler reports a mistake', () =>
    inFolder(async (temp) => {
      const file = join(temp, 'wrong.ts')
      const wrong = 'export const wrong: number = LockService.connect()'
      await writeFile(file, `import { LockService } from '${root}index.js'\n${wrong}\n`)
      const { status, stdout } = await compile([file], withNode)
      assert.notEqual(status, 0)
      assert.match(stdout, /wrong\.ts.*TS2322/)
    }))

  it('the declarations have exactly the members of the classes', async () => {
    const declarations = await readFile(join(root, 'index.d.ts'), 'utf8')
    const membersOf = (name) => {
      const pattern = new RegExp(`^export (?:interface|declare class) ${name} .*?\\{\\n(.*?)\\n\\}`, 'ms')
      const [, body] = declarations.match(pattern) ?? assert.fail(`${name} is not declared`)
      const members = [...body.matchAll(/^ {2}(?:readonly |get )?(\w+)\b(?:<\w+>)?[(:]/gm)].map((match) => match[1])
      return [...new Set(members)].sort()
    }
    const service = await LockService.connect('memory:')
    const lock = await service.acquire('x')
    const namesOf = (object) => Object.getOwnPropertyNames(Object.getPrototypeOf(object))
    const actual = (object) =>
      namesOf(object)
        .filter((name) => name !== 'constructor')
        .sort()
    assert.deepEqual(actual(lock), membersOf('Lock'))
    assert.deepEqual(actual(service), membersOf('LockService'))
    assert.deepEqual(Object.keys(service.stats()).sort(), membersOf('LockStats'))
    assert.deepEqual(Object.keys(Object(await service.inspect('x'))).sort(), membersOf('LockInfo'))
    await service.close()
  })

  it('the comments have the default and the unit of every option', async () => {
    const declarations = await readFile(join(root, 'index.d.ts'), 'utf8')
    const optional = [...declarations.matchAll(/\/\*\*((?:(?!\*\/).)*)\*\/\n {2}(\w+)\?: (number|boolean|Duration)/gs)]
    assert.ok(optional.length >= 10)
    for (const [, comment, name] of optional) assert.match(comment, /@default|seconds\./, name)
  })
})
