// The structure check passes on this tree.
import assert from 'node:assert/strict'
import { join } from 'node:path'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { checkMutants, checkStructure, readMutants } from '../scripts/structure.mjs'

const root = fileURLToPath(new URL('..', import.meta.url))

test('the structure of src/ has no problem', () => {
  assert.deepEqual(checkStructure(join(root, 'src')), [])
})

test('each mutant can be planted, and its test exists', () => {
  const mutants = readMutants(root)
  assert.ok(mutants.length >= 20)
  assert.equal(new Set(mutants.map(({ name }) => name)).size, mutants.length)
  assert.deepEqual(checkMutants(root, mutants), [])
})
