// MongoDB stalls under load and continues: calls succeed again, leases survive, nothing is left.
import { describe, it } from 'node:test'
import { lateWrites, replacedClient, stall } from './soak/mongodb.mjs'

/** A test of one case, which shows its figures. */
const test = (title, run) => it(title, { timeout: 120_000 }, async (t) => t.diagnostic(await run()))

describe('mongodb: stalls', { concurrency: 3 }, () => {
  test('calls succeed again after a standalone server was stopped for 12 s', () => stall({ how: 'SIGSTOP' }))
  test('calls succeed again after a replica set was locked by fsyncLock for 12 s', () =>
    stall({ how: 'fsyncLock', replicaSet: true }))
  test('a client whose commands are never answered is replaced', () => replacedClient())
  test('close() leaves nothing of calls whose writes are executed late', () => lateWrites())
})
