// The contract on PostgreSQL behind PgBouncer in transaction mode.
import { describe } from 'node:test'
import { contract } from './contract.mjs'

// At the same time: the tests wait most of the time.
describe('behind PgBouncer', { concurrency: 2 }, () => {
  contract('postgres-pooler')
  contract('postgres-pooler-declared')
})
