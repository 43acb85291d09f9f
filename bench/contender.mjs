// One contender in a process of its own, told by its parent what to measure.
//
// The contract of a file under contenders/:
//
//   does        one line: the owner check, the fencing token, the renewal, and what of these it does not do
//   setting     one line: how it is set up here, and why that is its best
//   kind        'library' (a lock library), 'driver' (a bare driver, no library) or 'code' (a page of one's own code)
//   packages    the npm packages that its user installs, driver included, as folders of bench/node_modules; [] for holdfast
//   connect(...urls)  resolves to an object with those of the following that it takes part in. More than one URL is a quorum.
//
//     pair(name)            acquires a free name and releases it; throws unless both succeeded
//     take(name)            acquires a free name and keeps it for TAKEN_MS without renewal
//     tryHeld(name)         one try of a name that another process has taken; throws unless it was answered "busy"
//     hold(name, ttlMs)     acquires a free name and renews it for ever (leases.mjs); `holds` names the verb, `lost()` counts
//     wait(name, retryMs)   waits for the name, and resolves to a function that releases it (handoff.mjs)
//     close()               gives back what is held and the connections
//
// A name is made for its contender by the parent. No contender keeps anything about a name between two calls: a service does
// not know beforehand which names it will lock.
import { performance } from 'node:perf_hooks'

const [, , module, ...urls] = process.argv
const { connect } = await import(`./contenders/${module}.mjs`)
const contender = await connect(...urls)

/** Runs `once(name)` in `inFlight` loops, each on a name of its own, for about `ms`. */
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
      for (let now = performance.now(); now < end; ) {
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

process.on('message', async ({ what, ...load }) => {
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
// A driver would try for ever to reach a server that went away with the parent.
process.on('disconnect', () => process.exit())
process.send('ready')
