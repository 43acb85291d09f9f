// A MongoDB that stalls under load and continues, and bursts of calls: service resumes, leases survive, nothing is left.
import { describe, it } from 'node:test'
import { burst, crowd, stall } from './soak/mongodb.mjs'

describe('mongodb: stalls', { concurrency: 2 }, () => {
  it('service resumes after a standalone server was stopped for 12 s', (t) => stall({ how: 'SIGSTOP' }).then((figures) => t.diagnostic(JSON.stringify(figures))))
  it('service resumes after a replica set was locked by fsyncLock for 12 s', (t) =>
    stall({ how: 'fsyncLock', replicaSet: true }).then((figures) => t.diagnostic(JSON.stringify(figures))))
})

describe('mongodb: bursts', () => {
  it('5 000 attempts at once, twice', (t) => burst({ bursts: 2 }).then((figures) => t.diagnostic(JSON.stringify(figures))))
  it('1 000 waiters of one process for one name', (t) => crowd().then((figures) => t.diagnostic(JSON.stringify(figures))))
})
