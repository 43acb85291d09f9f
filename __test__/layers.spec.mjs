// The layer check passes on this tree, and fails on each kind of forbidden import.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { checkLayers, checkSurface, surfaceViolations, violations } from '../scripts/layers.mjs'

test('no file imports across a layer', () => {
  assert.deepEqual(checkLayers(fileURLToPath(new URL('../src', import.meta.url))), [])
})

const crossings = [
  ['service/acquire.rs', 'use napi::Env;'],
  ['engine/redis/mod.rs', 'use napi_derive::napi;'],
  ['service/mod.rs', 'use redis::cmd;'],
  ['js/lock.rs', 'let client = ::mongodb::Client::new();'],
  ['engine/memory.rs', 'sqlx::query("select 1")'],
  ['engine/redis/mod.rs', 'use crate::engine::memory::MemoryEngine;'],
  ['engine/sql/mod.rs', 'use crate::service::Locks;'],
  ['service/mod.rs', 'use crate::engine::redis::RedisEngine;'],
  ['service/lease/mod.rs', 'use crate::js::value;'],
  ['js/service.rs', 'use crate::engine::Engine;'],
  ['model.rs', 'use crate::engine::Engine;'],
]
for (const [path, line] of crossings) {
  test(`${path} must not contain: ${line}`, () => assert.equal(violations(path, `fn f() {}\n${line}\n`).length, 1))
}

test('allowed imports pass', () => {
  assert.deepEqual(violations('js/lock.rs', 'use napi::Env;'), [])
  assert.deepEqual(violations('engine/redis/mod.rs', 'use redis::cmd;'), [])
  assert.deepEqual(violations('engine/config.rs', 'super::redis::RedisConfig::parse(url)'), [])
  assert.deepEqual(violations('service/mod.rs', '// as redis::Client does'), [])
  assert.deepEqual(violations('js/connect.rs', 'use crate::engine::{EngineConfig, Settings};'), [])
})

test('the surface in TypeScript has no timers and reads no clock', () => {
  assert.deepEqual(checkSurface(fileURLToPath(new URL('../lib', import.meta.url))), [])
  const clocks = [
    'setTimeout(f, 5)',
    'setInterval(f)',
    'Date.now()',
    'new Date()',
    'performance.now()',
    'process.hrtime()',
    'setImmediate(f)',
  ]
  for (const code of clocks) assert.equal(surfaceViolations('lock.ts', `// why\n${code}\n`).length, 1, code)
  assert.deepEqual(surfaceViolations('lock.ts', '/** Date.now() */\n// new Date()\nnew Date(holder.since)\n'), [])
})
