// The vocabulary check passes on this tree, and fails where a replaced word comes back.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { checkWords, findings } from '../scripts/words.mjs'

test('the checked files contain no replaced word', () => {
  process.chdir(fileURLToPath(new URL('..', import.meta.url)))
  assert.deepEqual(checkWords(), [])
})

/** @type {[string, string, string[]][]} */
const replaced = [
  ['src/a.rs', '/// Whoever has no ear yet takes no turn.', ['whoever', 'ear']],
  ['src/a.rs', 'let x = "the waiter is told of it"; // in vain', ['told', 'in vain']],
  ['src/a.lua', '-- gives the name back', []],
  ['src/a.lua', '-- gives it back to the next one in line', ['gives it back', 'in line']],
  ['src/a.sql', '-- the lease is over', ['is over']],
  ['lib/a.ts', '/**\n * Lets go of the lock.\n */', ['lets go']],
  ['__test__/a.mjs', "test('a waiter that gives up in the same turn', () => {})", ['gives up', 'same turn']],
  ['__test__/a.mjs', 'throw new Error(`${name} shall be free`)', ['shall']],
  ['__test__/the-lane.mjs', '', ['lane']],
  ['docs/a.md', 'Somebody looks.', ['somebody', 'looks']],
]
for (const [path, text, words] of replaced) {
  test(`${path} must not contain: ${text.trim()}`, () =>
    assert.deepEqual(
      findings(path, text)
        .map(({ word }) => word)
        .sort(),
      [...words].sort(),
    ))
}

test('code, identifiers, inline code and code blocks are not checked', () => {
  assert.deepEqual(findings('src/a.rs', 'let told = tell(ear, \'x\', "told");'), [])
  assert.deepEqual(findings('src/a.rs', "fn f<'a>(told: &'a str) {} // `told` is a name"), [])
  assert.deepEqual(findings('__test__/a.mjs', "const told = /whoever is told/.exec('told')"), [])
  assert.deepEqual(findings('docs/a.md', 'Not `told`:\n\n```js\n// who is told\n```\n'), [])
})
