// The layer check passes on this tree.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { checkLayers, checkSurface } from '../scripts/layers.mjs'

const at = (path) => fileURLToPath(new URL(`../${path}`, import.meta.url))

test('no file imports across a layer', () => {
  assert.deepEqual(checkLayers(at('src')), [])
})

test('the surface in TypeScript has no timers and reads no clock', () => {
  assert.deepEqual(checkSurface(at('lib')), [])
})
