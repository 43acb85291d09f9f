// MongoDB for the suite of durability.
import { locateMongod } from '../../scripts/servers.mjs'
import { startMongoReplicaSet } from '../../scripts/topologies.mjs'
import { TEST_COMMANDS, newPrimary, withoutReplication } from '../replica-set.mjs'

/** Starts three members. A grant waits for two of them. See `postgres-replication.mjs`. */
async function startPair() {
  const set = await startMongoReplicaSet({ args: TEST_COMMANDS })
  /** @type {any} */
  let replication
  /** @type {any} */
  let lost
  return {
    replica: { url: set.url },
    url: () => set.url,
    detach: async () => void (replication = await withoutReplication(set)),
    attach: () => replication?.end(),
    async lose() {
      lost = await set.primary()
      await lost.kill()
    },
    promote: () => newPrimary(set, lost),
    stop: () => set.stop(),
  }
}

/** What the suites need of a store. */
export const mongodb = {
  kind: 'mongodb',
  locate: locateMongod,
  // `outage.spec.mjs` has a kill of a server.
  logs: [],
  /** The rounds of the suite of durability: others differ in the statements of SQL servers, and each takes seconds here. */
  handOffs: [0, 4],
  startPair,
}
