// The structure check passes on this tree, and fails on each kind of problem.
import assert from 'node:assert/strict'
import { join } from 'node:path'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { codeLines, problemsOfLines } from '../scripts/code-lines.mjs'
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

test('the file with the trait of all stores imports none of them', () => {
  const files = { 'engine/mod.rs': 'pub use config::parse;', 'engine/config.rs': 'use super::redis::Redis;' }
  const redis = {
    'engine/redis/mod.rs': 'use crate::engine::Engine; use self::ops::x;',
    'engine/redis/ops.rs': 'use super::y;',
  }
  assert.deepEqual(circles(importGraph({ ...files, ...redis })), [
    ['engine/mod.rs', 'engine/config.rs', 'engine/redis/mod.rs'],
  ])
  assert.deepEqual(circles(importGraph({ ...files, ...redis, 'engine/mod.rs': 'pub mod config;' })), [])
})

test('large folders, long files and conditional compilation are found', () => {
  const many = Object.fromEntries(Array.from({ length: 13 }, (_, i) => [`room/f${i}.rs`, '']))
  assert.match(problemsOf(many).join(), /src\/room has 13 files/)
  assert.match(problemsOf({ 'long.rs': 'x\n'.repeat(401) }).join(), /401 lines/)
  assert.match(problemsOf({ 'cfg.rs': '#[cfg(all(unix, test))]\n'.repeat(16) }).join(), /16 lines with cfg/)
  const ofFeature = '#[cfg(feature = "redis")]\n'
  assert.match(problemsOf({ 'cfg.rs': `${ofFeature}fn f() {}\n`.repeat(21) }).join(), /21 items with cfg\(feature\)/)
  assert.deepEqual(problemsOf({ 'cfg.rs': `${ofFeature}pub mod redis;\n`.repeat(31) }), [])
  assert.deepEqual(problemsOf({ 'cfg.rs': '#[cfg(not(unix))]\n'.repeat(15), 'tests/long.rs': 'x\n'.repeat(401) }), [])
})

test('too many methods of the trait of all stores, and a default of one, are found', () => {
  /** @param {string[]} methods */
  const engine = (methods) => ({ 'engine/mod.rs': `//!\npub trait Engine: Send {\n${methods.join('\n')}\n}\n` })
  const required = Array.from({ length: 9 }, (_, i) => `    async fn m${i}(&self, of: &[u8]) -> Result<()>;`)
  assert.deepEqual(problemsOf(engine(required)), [])
  assert.match(problemsOf(engine([...required, '    fn more(&self);'])).join(), /Engine has 10 methods, more than 9/)
  assert.deepEqual(problemsOf(engine(['    fn some(&self) -> bool {', '        true', '    }'])), [
    'Engine::some has a default',
  ])
})

test('a code line more or less than the budget of its folder is found; comments, blank lines and tests are none', () => {
  const rust =
    '//! A module.\n\nuse a::b;\n\n/// A function.\nfn f() {}\n\n#[cfg(test)]\nmod tests {\n    fn g() {}\n}\n'
  assert.equal(codeLines('a.rs', rust), 2)
  assert.equal(codeLines('a.lua', '-- A script.\nreturn 1\n'), 1)
  assert.equal(codeLines('a.ts', '/**\n * A value.\n */\nexport const a = 1 // one\n'), 1)
  assert.deepEqual(problemsOfLines({ lib: 2 }, { lib: 2 }), [])
  assert.match(problemsOfLines({ lib: 3 }, { lib: 2 }).join(), /^lib has 3 code lines, more than its budget of 2$/)
  assert.match(problemsOfLines({ lib: 1 }, { lib: 2 }).join(), /^lib has 1 code lines: its budget of 2 is to fall/)
  assert.match(problemsOfLines({ bin: 1 }, {}).join(), /^bin has 1 code lines, more than its budget of 0$/)
})
