// The vocabulary check passes on this tree, and fails where a replaced word comes back.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { checkWords, findings } from '../scripts/words.mjs'

test('the checked files contain no replaced word', () => {
  process.chdir(fileURLToPath(new URL('..', import.meta.url)))
  assert.deepEqual(checkWords(), [])
})

test('replaced words are found in comments, messages, documents and names of files', () => {
  /** @type {[string, string, string[]][]} */
  const texts = [
    ['src/a.rs', 'let x = "the waiter is told of it"; // in vain', ['in vain', 'told']],
    ['src/a.lua', '-- gives it back to the next one in line', ['gives it back', 'in line']],
    ['src/a.sql', '-- the lease is over', ['is over']],
    ['lib/a.ts', '/**\n * Lets go of the lock.\n */', ['lets go']],
    ['__test__/a.mjs', 'throw new Error(`${name} shall be free`)', ['shall']],
    ['__test__/the-lane.mjs', '', ['lane']],
    ['docs/a.md', 'Somebody looks.', ['looks', 'somebody']],
    // Code, identifiers, inline code and code blocks are not checked.
    ['src/a.rs', 'fn f<\'a>(told: &\'a str) { tell(ear, "told") } // `told` is a name', []],
    ['__test__/a.mjs', "const told = /whoever is told/.exec('told')", []],
    ['docs/a.md', 'Not `told`:\n\n```js\n// who is told\n```\n', []],
  ]
  for (const [path, text, words] of texts) {
    const found = findings(path, text).map(({ word }) => word)
    assert.deepEqual(found.sort(), words, `${path}: ${text}`)
  }
})
