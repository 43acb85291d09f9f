// Pairs over a network whose round trips take longer than on loopback.
import { measureAll } from '../contender-processes.mjs'
import { openDelayProxy } from '../delay-proxy.mjs'
import { onServer, redis } from './stores.mjs'

const LINKS_MS = [0.5, 2]
const LOADS = [1, 64, 1024]

export async function delayed(timing) {
  return onServer(redis, async ({ server, probe, version }) => {
    const fields = []
    for (const extraMs of LINKS_MS) {
      const proxy = await openDelayProxy(server, extraMs)
      const before = await proxy.tripMs()
      const results = await measureAll({
        contenders: redis.contenders,
        urls: [proxy.url],
        what: 'pair',
        loads: LOADS,
        probe,
        ...timing,
      })
      const after = await proxy.tripMs()
      await proxy.close()
      const note =
        `A PING through this proxy takes ${before.toFixed(2)} ms before the part and ${after.toFixed(2)} ms after it, and ` +
        `${proxy.bareMs.toFixed(2)} ms without the proxy.`
      fields.push({
        title: `Pairs, ${version}, ${extraMs} ms more per round trip`,
        note,
        one: 'pair',
        floor: redis.floor,
        results,
      })
    }
    return { fields }
  })
}
