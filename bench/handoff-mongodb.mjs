// Hand-offs on MongoDB, on a replica set with one member: no replication, and a majority is the journal of that member.
//
//   npm run bench:handoff-mongodb               writes bench/results-handoff-mongodb.md
//   npm run bench:handoff-mongodb -- --quick    a smoke test: every contender works
//
// Uses the addon in NAPI_RS_NATIVE_LIBRARY_PATH if set.
import { startMongod } from '../scripts/servers.mjs'
import { measureHandOffs, prepare } from './measure-handoffs.mjs'
import { USUAL_MS } from './poll.mjs'
import { serverVersion, withMajority } from './report.mjs'

/**
 * The gist and mongodb-lock cannot wait, so users poll (see poll.mjs). locco has no default pause; this is the one in its
 * documentation.
 */
const CONTENDERS = [
  { module: 'holdfast', setting: 'default' },
  { module: 'gist', setting: `tries every ${USUAL_MS} ms` },
  { module: 'mongodb-lock', setting: `tries every ${USUAL_MS} ms` },
  { module: 'locco', setting: 'as documented: tries every 200 ms' },
]

/** Commands that read, write or wait for data. Other commands of members, drivers and monitors are not counted. */
const COUNTED = [
  'aggregate',
  'delete',
  'find',
  'findAndModify',
  'getMore',
  'insert',
  'update',
  'commitTransaction',
  'abortTransaction',
]

await prepare()
const { MongoClient } = await import('mongodb')
const server = await startMongod({ replicaSet: true })
const url = withMajority(server.url)
const client = await MongoClient.connect(url)
const admin = client.db('admin')

async function commands() {
  const { metrics } = await admin.command({ serverStatus: 1 })
  return COUNTED.reduce((sum, name) => sum + Number(metrics.commands[name]?.total ?? 0), 0)
}

const store = {
  url,
  version: await serverVersion('mongodb', server.url),
  packages: ['mongodb', 'mongodb-lock', 'mongodb3', '@kontsedal/locco'],
  probe: 'ping of the official driver',
  ping: () => admin.command({ ping: 1 }),
  reset: () => client.db().dropDatabase(),
  async count() {
    const before = await commands()
    return async () => (await commands()) - before
  },
  counted:
    'All write with `w=majority`. Commands are those that read, write or wait for data, including the one with which the ' +
    'last holder waits again.',
}
await measureHandOffs({ store, contenders: CONTENDERS, file: 'results-handoff-mongodb.md' })
await client.close()
await server.stop()
