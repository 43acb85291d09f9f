// The layer check passes on this tree, and fails on each kind of forbidden import.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { checkLayers, checkSurface, surfaceViolations, violations } from '../scripts/layers.mjs'

const at = (path) => fileURLToPath(new URL(`../${path}`, import.meta.url))

test('no file imports across a layer', () => {
  assert.deepEqual(checkLayers(at('src')), [])
  const crossings = {
    'service/acquire.rs': 'use napi::Env;',
    'service/mod.rs': 'use redis::cmd;',
    'js/lock.rs': 'let client = ::mongodb::Client::new();',
    'engine/memory.rs': 'sqlx::query("select 1")',
    'engine/redis/mod.rs': 'use crate::engine::memory::MemoryEngine;',
    'engine/sql/mod.rs': 'use crate::service::Locks;',
    'service/wait.rs': 'use crate::engine::redis::RedisEngine;',
    'service/lease/mod.rs': 'use crate::js::value;',
    'js/service.rs': 'use crate::engine::Engine;',
    'model.rs': 'use crate::engine::Engine;',
  }
  for (const [path, line] of Object.entries(crossings))
    assert.equal(violations(path, `fn f() {}\n${line}\n`).length, 1, `${path}: ${line}`)
  assert.deepEqual(violations('engine/redis/mod.rs', 'use redis::cmd;'), [])
  assert.deepEqual(violations('engine/config.rs', 'super::redis::RedisConfig::parse(url) // as redis::Client does'), [])
  assert.deepEqual(violations('js/connect.rs', 'use crate::engine::{EngineConfig, Settings};'), [])
})

test('the surface in TypeScript has no timers and reads no clock', () => {
  assert.deepEqual(checkSurface(at('lib')), [])
  for (const code of ['setTimeout(f, 5)', 'Date.now()', 'new Date()', 'process.hrtime()'])
    assert.equal(surfaceViolations('lock.ts', `// why\n${code}\n`).length, 1, code)
  assert.deepEqual(surfaceViolations('lock.ts', '/** Date.now() */\n// new Date()\nnew Date(holder.since)\n'), [])
})
