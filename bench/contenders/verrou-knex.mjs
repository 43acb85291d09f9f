// verrou on its Knex driver: a row is inserted, and deleted.
import { Verrou } from '@verrou/core'
import { knexStore } from '@verrou/core/drivers/knex'
import knex from 'knex'
import { sslOf } from '../ssl.mjs'

export const kind = 'library'
export const packages = ['@verrou/core', 'knex', 'pg']
export const does =
  'owner check, by a token of `Math.random`; no fencing token, no renewal, expiry by the client’s clock'
export const settings = {
  '': 'Knex with a pool of 10 connections; `acquireImmediately`, one try; waiters try every 250 ms',
}

export async function connect({ urls: [url], caFile }) {
  const options = { connectionString: url, ...sslOf(caFile) }
  const connection = knex({ client: 'pg', connection: options, pool: { min: 10, max: 10 } })
  const driver = knexStore({ connection })
  const verrou = new Verrou({ default: 'sql', stores: { sql: { driver } } })
  return {
    async pair(name) {
      const lock = verrou.createLock(name, 30_000)
      if (!(await lock.acquireImmediately())) throw new Error(`${name} was busy`)
      // Throws when the lock was lost.
      await lock.release()
    },
    async wait(name, retryMs) {
      const lock = verrou.createLock(name, 30_000)
      if (!(await lock.acquire(retryMs === undefined ? {} : { retry: { delay: retryMs } })))
        throw new Error(`${name}: timed out`)
      return () => lock.release()
    },
    close: () => connection.destroy(),
  }
}
