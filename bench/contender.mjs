// The process of one contender. Measures what its parent requests.
//
// The contract of a file under contenders/:
//
//   does        one line: owner check, fencing token and renewal, each present or missing
//   setting     one line: the configuration here, and why it is the best one
//   kind        'library' (a lock library), 'driver' (a bare driver, no library) or 'code' (a page of one's own code)
//   packages    the npm packages that its user installs, driver included, as folders of bench/node_modules; [] for holdfast
//   connect(...urls)  resolves to an object with the functions of the parts that it takes part in. Several URLs are a quorum.
//
//     pair(name)            acquires a free name and releases it; throws unless both succeeded
//     take(name)            acquires a free name for HELD_TTL_MS without renewal
//     tryHeld(name)         one attempt for a name that another process holds; throws unless the result is "busy"
//     hold(name, ttlMs)     acquires a free name and renews it until the end (leases.mjs); `holds` names the verb, `lost()` counts
//     wait(name, retryMs)   waits for the name, and resolves to a function that releases it (handoff.mjs)
//     close()               releases the held names and closes the connections
//
// The parent chooses the names. A contender keeps nothing about a name between two calls: a service does not know its names in
// advance.
import { performance } from 'node:perf_hooks'

const [, , module, ...urls] = process.argv
const { connect } = await import(`./contenders/${module}.mjs`)
const contender = await connect(...urls)

/** Runs `once(name)` in `inFlight` concurrent loops, each with its own name, for about `ms` milliseconds. */
async function measure(once, { inFlight, ms, prefix }) {
  const latencies = []
  let count = 0
  const cpu = process.cpuUsage()
  const loop = performance.eventLoopUtilization()
  const start = performance.now()
  const end = start + ms
  await Promise.all(
    Array.from({ length: inFlight }, async (_, i) => {
      const name = prefix + i
      for (let now = performance.now(); now < end;) {
        await once(name)
        const then = now
        now = performance.now()
        latencies.push(now - then)
        count++
      }
    }),
  )
  const elapsed = performance.now() - start
  const { active } = performance.eventLoopUtilization(loop)
  const { user, system } = process.cpuUsage(cpu)
  latencies.sort((a, b) => a - b)
  return {
    count,
    perSecond: (count / elapsed) * 1000,
    loopUs: (active * 1000) / count,
    cpuUs: (user + system) / count,
    p50Us: latencies[Math.floor(count * 0.5)] * 1000,
    p99Us: latencies[Math.floor(count * 0.99)] * 1000,
  }
}

process.on('message', async (/** @type {any} */ { what, ...load }) => {
  if (what === 'close') {
    await contender.close()
    process.disconnect()
    return
  }
  if (what === 'take') {
    await Promise.all(Array.from({ length: load.count }, (_, i) => contender.take(load.prefix + i)))
    process.send('taken')
    return
  }
  process.send(await measure(contender[what], load))
})
// Without this a driver would try to reconnect for ever after the parent has ended.
process.on('disconnect', () => process.exit())
process.send('ready')
