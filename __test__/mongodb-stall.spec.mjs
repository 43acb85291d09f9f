// A MongoDB that stalls under load and continues, and bursts of calls: service resumes, leases survive, nothing is left.
import { describe, it } from 'node:test'
import { burst, crowd, silence, stall } from './soak/mongodb.mjs'

/** A test of one case, which shows its figures. */
const test = (title, run) => it(title, { timeout: 120_000 }, async (t) => t.diagnostic(JSON.stringify(await run())))

describe('mongodb: stalls', { concurrency: 2 }, () => {
  test('service resumes after a standalone server was stopped for 12 s', () => stall({ how: 'SIGSTOP' }))
  test('service resumes after a replica set was locked by fsyncLock for 12 s', () => stall({ how: 'fsyncLock', replicaSet: true }))
})

describe('mongodb: bursts', () => {
  test('5 000 attempts at once, twice', () => burst({ bursts: 2 }))
  test('300 waiters of one process, and of ten, for one name', async () => [
    await crowd({ waiters: 300 }),
    await crowd({ waiters: 300, services: 10 }),
  ])
  test('commands that are never answered keep no connection for good', () => silence())
})
