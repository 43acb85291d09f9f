// The documents agree with the code: tables, links, paths, commands, and the page that is made from the types.
import assert from 'node:assert/strict'
import { existsSync, readdirSync, statSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { describe, test } from 'node:test'
import { documentsWithFigures } from '../bench/figures.mjs'
import { apiOf } from '../scripts/api.mjs'
import { documents, membersOf, read, root, rowsOf } from './readme/blocks.mjs'

/** The documents for users: not those for contributors, and not the page that is made from the types. */
const PAGES = documents().filter((path) => !/^docs\/([A-Z]+|api|quorum|speed|versions|bundlers)\.md$/.test(path))

/**
 * Lists the paragraphs of a document: also each item of a list, and each cell of a table. Code blocks are none.
 *
 * @param {string} path
 */
const paragraphsOf = (path) =>
  read(path)
    .replaceAll(/^```[\s\S]*?^```/gm, '')
    .split(/\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |\|)/)
    .flatMap((text) => (text.startsWith('|') ? text.split('|') : [text]))
/** @param {string} text */
const wordsIn = (text) => text.split(/\s+/).filter((word) => /\w/.test(word)).length
const ALL = ['README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'SECURITY.md', 'bench/README.md', ...documents()]

describe('lengths', () => {
  test('the README has at most 150 lines', () => assert.ok(read('README.md').trim().split('\n').length <= 150))
  test('docs/speed.md has at most 150 lines', () => assert.ok(read('docs/speed.md').trim().split('\n').length <= 150))
  test('docs/ARCHITECTURE.md has at most 250 lines, and no paragraph over 90 words', () => {
    assert.ok(read('docs/ARCHITECTURE.md').trim().split('\n').length <= 250)
    assert.deepEqual(
      paragraphsOf('docs/ARCHITECTURE.md').filter((text) => wordsIn(text) > 90),
      [],
    )
  })
  for (const path of PAGES) {
    test(`${path} has at most 200 lines`, () => assert.ok(read(path).trim().split('\n').length <= 200))
  }
})

describe('the API', () => {
  test('docs/api.md is what scripts/api.mjs makes from index.d.ts', () => {
    assert.equal(read('docs/api.md'), apiOf(read('index.d.ts')), 'run `node scripts/api.mjs`')
  })

  test('docs/api.md has every member', () => {
    const text = read('docs/api.md')
    for (const type of ['AcquireOptions', 'ExecuteOptions', 'ConnectOptions', 'LockInfo', 'LockStats']) {
      assert.ok(membersOf(type).length > 3)
      for (const member of membersOf(type)) assert.ok(text.includes(`\n| \`${member}\` | `), `${type}.${member}`)
    }
    for (const type of ['Lock', 'LockService', 'LockError']) {
      assert.ok(membersOf(type).length > 4)
      for (const member of membersOf(type)) {
        if (member !== 'constructor') assert.match(text, new RegExp(`^### ${member}$`, 'm'), `${type}.${member}`)
      }
    }
  })

  test('docs/api.md has an example of each method of a service and of a lock', () => {
    const [, service, lock] = read('docs/api.md').split(/^## /m)
    const methods = [service, lock]
      .flatMap((section) => section.split(/^### /m).slice(1))
      .filter((text) => /^- `(?!get )[^`]*\(/m.test(text))
    assert.ok(methods.length > 15)
    const without = methods.filter((text) => !text.includes('```ts')).map((text) => text.split('\n')[0])
    assert.deepEqual(without, [])
  })

  test('the README names every call of the service', () => {
    const text = read('README.md')
    for (const member of membersOf('LockService').filter((name) => name !== 'constructor')) {
      assert.match(text, new RegExp(`\\b${member}\\b`), member)
    }
  })

  test('the README and docs/errors.md have every error code', () => {
    const codes = read('index.d.ts')
      .match(/^export type LockErrorCode = (.*)$/m)?.[1]
      .match(/LOCK_\w+/g)
      ?.sort()
    const [, section] = read('README.md').split('\n## Errors\n')
    assert.deepEqual(
      [...section.split('\n## ')[0].matchAll(/^\| `(LOCK_\w+)` \|/gm)].map(([, code]) => code).sort(),
      codes,
    )
    const headings = [...read('docs/errors.md').matchAll(/^## (LOCK_\w+)$/gm)]
    assert.deepEqual(headings.map(([, code]) => code).sort(), codes)
  })
})

describe('the figures are those of the committed benchmarks', () => {
  const documents = documentsWithFigures()
  assert.ok(Object.keys(documents).length > 3)
  for (const [path, text] of Object.entries(documents)) {
    test(path, () => assert.equal(read(path), text, 'run `node bench/figures.mjs`'))
  }
})

test('all rows of a table have the same number of cells', () => {
  assert.ok(rowsOf('README.md').length > 20)
  for (const path of ALL) {
    for (const table of read(path).match(/(^\|.*\|\n)+/gm) ?? []) {
      const widths = table
        .trim()
        .split('\n')
        .map((line) => line.replaceAll(/`[^`]*`/g, '').split('|').length)
      assert.equal(new Set(widths).size, 1, `${path}: ${table}`)
    }
  }
})

describe('all links resolve', () => {
  const slug = (heading) =>
    heading
      .toLowerCase()
      .replace(/[^\w -]/g, '')
      .replaceAll(' ', '-')
  for (const path of ALL) {
    test(path, () => {
      for (const [, link, section] of read(path).matchAll(/\]\(([^)#\s]*)(?:#([^)]*))?\)/g)) {
        if (/^https?:/.test(link)) continue
        const target = link ? join(dirname(path), link) : path
        assert.ok(statSync(join(root, target), { throwIfNoEntry: false }), `${path}: ${link}`)
        const headings = section ? [...read(target).matchAll(/^#+ (.*)$/gm)].map(([, heading]) => slug(heading)) : []
        if (section) assert.ok(headings.includes(section), `${path}: ${link}#${section}`)
      }
    })
  }
})

test('every document can be reached from the README', () => {
  const reached = new Set()
  const visit = (path) => {
    if (reached.has(path) || !path.endsWith('.md') || !existsSync(join(root, path))) return
    reached.add(path)
    for (const [, link] of read(path).matchAll(/\]\(([^)#\s]+)/g)) {
      if (!/^https?:/.test(link)) visit(join(dirname(path), link).replaceAll('\\', '/'))
    }
  }
  visit('README.md')
  assert.deepEqual(
    documents().filter((path) => !reached.has(path)),
    [],
  )
})

test('the commands of CONTRIBUTING.md exist', () => {
  const { scripts } = JSON.parse(read('package.json'))
  const commands = [...read('CONTRIBUTING.md').matchAll(/\bnpm (?:run )?(test|demo|check|bench|build[\w:]*)\b/g)]
  assert.ok(commands.length > 3)
  for (const [command, script] of commands) assert.ok(scripts[script], command)
})

test('every path in the documents and in src/lib.rs exists', () => {
  const folders = ['src', 'lib', 'bin', '__test__', 'scripts', 'examples', 'bench', 'docs', 'packages/nest/src'].filter(
    (folder) => existsSync(join(root, folder)),
  )
  const files = folders
    .flatMap((folder) =>
      readdirSync(join(root, folder), { recursive: true }).map((path) => join(folder, path).replaceAll('\\', '/')),
    )
    .filter((path) => !path.includes('/node_modules/'))
  const exists = (path) =>
    existsSync(join(root, path)) || files.some((file) => file.endsWith(`/${path.replace(/\/$/, '')}`))
  // The store of the recipe, the reader's own files, and file names of the documents' examples.
  const invented = ['src/engine/etcd.rs', 'distributed-locks.js', 'daily.json', 'holdfast/']
  for (const document of ['src/lib.rs', ...ALL.filter((path) => path !== 'CHANGELOG.md')]) {
    const path = /(?<![\w/.*-])(?:\.\/)?([a-z_.][\w./-]*(?:\.(?:rs|lua|sql|mjs|ts|js|toml|json)\b|\/(?=[\s`)])))/g
    // Links have a test of their own.
    const missing = [
      ...read(document)
        .replaceAll(/\]\([^)]*\)/g, ']')
        .matchAll(path),
    ]
      .map(([, named]) => named)
      .filter((named) => !exists(named) && !invented.includes(named))
    assert.deepEqual(missing, [], document)
  }
})
