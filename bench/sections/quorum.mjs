// Pairs on a quorum of independent Redis servers.
import { startRedis } from '../../scripts/servers.mjs'
import { measureAll } from '../contender-processes.mjs'
import { RedisProbe } from '../probes.mjs'
import { QUORUM } from './stores.mjs'

const SIZES = [3, 5]
const LOADS = [1, 64]

export async function quorum(timing) {
  const servers = await Promise.all(Array.from({ length: Math.max(...SIZES) }, () => startRedis()))
  try {
    const fields = []
    for (const size of SIZES) {
      const members = servers.slice(0, size)
      const probe = await RedisProbe.open(...members)
      const urls = members.map((server) => server.url)
      const results = await measureAll({ contenders: QUORUM, urls, what: 'pair', loads: LOADS, probe, ...timing })
      fields.push({ title: `Pairs, quorum of ${size} × ${await probe.version()}`, one: 'pair', results })
      probe.close()
    }
    return { fields }
  } finally {
    await Promise.all(servers.map((server) => server.stop()))
  }
}
