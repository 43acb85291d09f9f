// The vocabulary check passes on this tree.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { checkWords } from '../scripts/words.mjs'

test('the checked files contain no replaced word', () => {
  process.chdir(fileURLToPath(new URL('..', import.meta.url)))
  assert.deepEqual(checkWords(), [])
})
