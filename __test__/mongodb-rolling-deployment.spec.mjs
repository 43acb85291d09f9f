// A deployment in the middle: instances that still run the gist and instances that run this, on one collection, killed
// and started again at random. What only the lock protects adds up.
import assert from 'node:assert/strict'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { describe } from 'node:test'
import { start } from './children/start.mjs'
import { withDatabase } from './database.mjs'
import { suite } from './stores.mjs'
import { sleep, until } from './tools.mjs'

const RUNS = 5
// A killed holder is in the way for so long, and in the gist's way until the TTL monitor has come round, too.
const TTL_MS = 1500
const FLEET = ['gist', 'gist', 'acquireLock', 'using', 'using']
/** How many more marks each instance makes, once the killing is over. */
const EACH = 3

const all = (child, key) => child.messages.filter((message) => Object.hasOwn(message, key)).map((message) => message[key])

/** What it began, and did not say that it has done. */
function openEnd(child) {
  const done = new Set(all(child, 'added'))
  return all(child, 'adding').filter((mark) => !done.has(mark))
}

async function run({ store, t }) {
  const folder = await mkdtemp(join(tmpdir(), 'holdfast-fleet-'))
  t.after(() => rm(folder, { recursive: true, force: true }))
  const file = join(folder, 'list')
  await writeFile(file, JSON.stringify({ count: 0, marks: [] }))
  const ever = []
  const launch = (way) => {
    const child = start(t, 'deployment', { url: store.target, way, name: 'counter', file, ttlMs: TTL_MS })
    ever.push(child)
    return { way, child }
  }
  const fleet = FLEET.map(launch)
  const hasWorked = ({ child }) => all(child, 'added').length > 0
  await until('everybody had a turn', () => fleet.every(hasWorked), 60_000)

  /** Kills one of them, and has another one of its kind take its place. */
  const replace = async (index) => {
    const { way, child } = fleet[index]
    child.kill('SIGKILL')
    assert.equal((await child.ended).signal, 'SIGKILL', child.stderr)
    fleet[index] = launch(way)
  }
  const anyone = () => Math.floor(Math.random() * fleet.length)
  /** Whoever of these ways is between its reading and its writing. */
  const holder = (...ways) => fleet.findIndex(({ way, child }) => ways.includes(way) && openEnd(child).length > 0)
  for (const ways of [['gist'], ['acquireLock', 'using']]) {
    let index
    await until(`${ways} holds the lock`, () => (index = holder(...ways)) >= 0, 60_000)
    await replace(index)
    await sleep(Math.random() * 300)
    await replace(anyone())
  }

  const goal = fleet.map(({ child }) => all(child, 'added').length + EACH)
  const isReached = () => fleet.every(({ child }, index) => all(child, 'added').length >= goal[index] || child.end)
  await until('all of them go on', isReached, 60_000)
  for (const { child } of fleet) assert.deepEqual(await child.endInput(), { code: 0, signal: null }, child.stderr)
  for (const child of ever) assert.equal(child.stderr, '')

  const { count, marks } = JSON.parse(await readFile(file, 'utf8'))
  const done = ever.flatMap((child) => all(child, 'added'))
  // A killed instance may have written without having said so: its mark tells.
  const unsaid = ever.flatMap(openEnd).filter((mark) => marks.includes(mark))
  assert.deepEqual([...marks].sort(), [...done, ...unsaid].sort())
  assert.equal(count, done.length + unsaid.length)
}

// Standalone and replica set at the same time: most of it is waiting for a dead holder's ttl.
describe('a fleet of both', { concurrency: 2 }, () => {
  for (const kind of ['mongodb', 'mongodb-replica-set']) {
    suite(kind, 'a fleet of gist and holdfast processes', (test) => {
      test(`the sums of ${RUNS} runs add up`, withDatabase(kind, async ({ store, t }) => {
        for (let count = 0; count < RUNS; count++) await run({ store, t })
        store.mayLeaveLocks = true
      }))
    })
  }
})
