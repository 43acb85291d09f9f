// The structure check passes on this tree, and fails on each kind of problem.
import assert from 'node:assert/strict'
import { join } from 'node:path'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { checkMutants, checkStructure, circles, importGraph, problemsOf, readMutants } from '../scripts/structure.mjs'

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

test('a mutant with a line that does not occur once, or without its test, is found', () => {
  const [mutant] = readMutants(root)
  const spec = '__test__/memory.spec.mjs'
  for (const { problem, ...change } of [
    { line: 'no such line', problem: /occurs 0 times/ },
    { line: '}', problem: /occurs \d+ times/ },
    { file: 'src/none.rs', problem: /occurs 0 times/ },
    { test: 'engine::memory::tests::no_such_test', problem: /no test engine::memory/ },
    { spec, test: String(Math.random()), problem: /no test 0\./ },
    { spec: '__test__/none.spec.mjs', problem: /no test/ },
  ]) {
    const problems = checkMutants(root, [{ ...mutant, ...change }])
    assert.equal(problems.length, 1)
    assert.match(problems[0], problem)
  }
})

test('a circle of three files is found, through every form of an import', () => {
  const files = {
    'a.rs': 'use crate::{b::{B, C}, d as e};',
    'b.rs': 'fn f() { super::room::inner::g() }',
    'room/inner.rs': 'pub(crate) use super::super::a::A;',
    'd.rs': '// use crate::a::A;\n#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n',
    'lib.rs': 'mod a; use a::A;',
  }
  assert.deepEqual(circles(importGraph(files)), [['a.rs', 'b.rs', 'room/inner.rs']])
  assert.equal(problemsOf(files).length, 1)
})

test('a file may import the mod.rs of its folder, which may import it', () => {
  const files = { 'a/mod.rs': 'use self::b::B;', 'a/b.rs': 'use super::C; use super::d::D;', 'a/d.rs': 'use super::C;' }
  assert.deepEqual(circles(importGraph(files)), [])
})

test('large folders, long files and conditional compilation are found', () => {
  const many = Object.fromEntries(Array.from({ length: 13 }, (_, i) => [`room/f${i}.rs`, '']))
  assert.match(problemsOf(many).join(), /src\/room has 13 files/)
  assert.match(problemsOf({ 'long.rs': 'x\n'.repeat(401) }).join(), /401 lines/)
  assert.match(problemsOf({ 'cfg.rs': '#[cfg(all(unix, test))]\n'.repeat(16) }).join(), /16 lines with cfg/)
  assert.deepEqual(problemsOf({ 'cfg.rs': '#[cfg(not(unix))]\n'.repeat(15), 'tests/long.rs': 'x\n'.repeat(401) }), [])
})
