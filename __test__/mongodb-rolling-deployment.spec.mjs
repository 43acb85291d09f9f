// A rolling deployment: instances of the gist and of holdfast on one collection, killed and restarted at random. A list that
// only the lock protects loses no mark.
import assert from 'node:assert/strict'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { describe } from 'node:test'
import { start } from './children/start.mjs'
import { withDatabase } from './database.mjs'
import { suite } from './stores.mjs'
import { sleep, until } from './tools.mjs'

const RUNS = 3
// The lease of a killed holder blocks the name for this time; the gist waits for the TTL monitor in addition.
const TTL_MS = 1500
const INSTANCES = ['gist', 'gist', 'acquireLock', 'using', 'using']
/** The number of marks that each instance makes after the last kill. */
const EACH = 3

const all = (child, key) =>
  child.messages.filter((message) => Object.hasOwn(message, key)).map((message) => message[key])

/** Lists the marks that an instance began and did not report as added. */
function unconfirmed(child) {
  const done = new Set(all(child, 'added'))
  return all(child, 'adding').filter((mark) => !done.has(mark))
}

async function run({ store, t }) {
  const folder = await mkdtemp(join(tmpdir(), 'holdfast-deployment-'))
  t.after(() => rm(folder, { recursive: true, force: true }))
  const file = join(folder, 'list')
  await writeFile(file, JSON.stringify({ count: 0, marks: [] }))
  const started = []
  const launch = (scenario) => {
    const child = start(t, 'deployment', { url: store.target, scenario, name: 'counter', file, ttlMs: TTL_MS })
    started.push(child)
    return { scenario, child }
  }
  const instances = INSTANCES.map(launch)
  const hasWorked = ({ child }) => all(child, 'added').length > 0
  await until('every instance has added a mark', () => instances.every(hasWorked), 60_000)

  /** Kills an instance, and starts another one of its kind. */
  const replace = async (index) => {
    const { scenario, child } = instances[index]
    child.kill('SIGKILL')
    assert.equal((await child.ended).signal, 'SIGKILL', child.stderr)
    instances[index] = launch(scenario)
  }
  const randomIndex = () => Math.floor(Math.random() * instances.length)
  /** Returns the index of an instance of these kinds that is between its read and its write. */
  const holder = (...scenarios) =>
    instances.findIndex(({ scenario, child }) => scenarios.includes(scenario) && unconfirmed(child).length > 0)
  for (const scenarios of [['gist'], ['acquireLock', 'using']]) {
    let index
    await until(`${scenarios} holds the lock`, () => (index = holder(...scenarios)) >= 0, 60_000)
    await replace(index)
    await sleep(Math.random() * 300)
    await replace(randomIndex())
  }

  const goal = instances.map(({ child }) => all(child, 'added').length + EACH)
  const isReached = () => instances.every(({ child }, index) => all(child, 'added').length >= goal[index] || child.end)
  await until('all instances continue', isReached, 60_000)
  for (const { child } of instances) assert.deepEqual(await child.endInput(), { code: 0, signal: null }, child.stderr)
  for (const child of started) assert.equal(child.stderr, '')

  const { count, marks } = JSON.parse(await readFile(file, 'utf8'))
  const done = started.flatMap((child) => all(child, 'added'))
  // A killed instance may have written a mark without reporting it.
  const unreported = started.flatMap(unconfirmed).filter((mark) => marks.includes(mark))
  assert.deepEqual([...marks].sort(), [...done, ...unreported].sort())
  assert.equal(count, done.length + unreported.length)
}

// Standalone and replica set at the same time: most of the time the test waits for a dead holder's ttl.
describe('a rolling deployment', { concurrency: 2 }, () => {
  for (const kind of ['mongodb', 'mongodb-replica-set']) {
    suite(kind, 'gist and holdfast processes', (test) => {
      test(
        `no mark is lost in ${RUNS} runs`,
        withDatabase(kind, async ({ store, t }) => {
          for (let count = 0; count < RUNS; count++) await run({ store, t })
          store.mayLeaveLocks = true
        }),
      )
    })
  }
})
