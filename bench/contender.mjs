// The process of one contender. Does what its parent requests.
//
// The contract of a file under contenders/:
//
//   does        one line: owner check, fencing token and renewal, each present or missing
//   settings    one line for each variant: the configuration here, and why it is the best one
//   variants    what is otherwise for a variant: its `does` and `kind`
//   kind        'library' (a lock library), 'driver' (a bare driver, no library) or 'code' (a page of one's own code)
//   packages    the npm packages that its user installs, driver included, as folders of bench/node_modules; [] for holdfast
//   connect({ urls, caFile }, variant)  resolves to an object with the functions of the parts that it takes part in. Several URLs
//               are a quorum; `caFile` is the authority of a server with TLS, `keyPrefix` the prefix of all names (holdfast only).
//
//     pair(name)            acquires a free name and releases it; throws unless both succeeded
//     take(name)            acquires a free name for HELD_TTL_MS without renewal
//     tryHeld(name)         one attempt for a name that another process holds; throws unless the result is "busy"
//     hold(name, ttlMs)     acquires a free name and renews it until the end (leases); `holds` names the verb, `lost()` counts
//     wait(name, retryMs)   waits for the name, and resolves to a function that releases it (hand-offs)
//     using(name, work)     waits for the name, calls `work` with renewal, releases the name, and returns the result (service)
//     close()               releases the held names and closes the connections
//
// The parent chooses the names. A contender keeps nothing about a name between two calls: a service does not know its names in
// advance.
import { performance } from 'node:perf_hooks'
import { setImmediate as nextTick } from 'node:timers/promises'
import { describe } from './describe.mjs'
import { leases } from './leases-tasks.mjs'
import { service } from './service-tasks.mjs'
import { percentile } from './report.mjs'

const [, , name, target] = process.argv
const { connect } = await describe(name)
const contender = await connect(JSON.parse(target))

/** Runs `once(name)` in `inFlight` concurrent loops, each with its own name, for about `ms` milliseconds, and at least once in each. */
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
      let now = performance.now()
      // A figure per call needs a call, also when the process stood still for the whole time.
      do {
        await once(name)
        const then = now
        now = performance.now()
        latencies.push(now - then)
        count++
      } while (now < end)
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
    p50Us: percentile(latencies, 0.5) * 1000,
    p99Us: percentile(latencies, 0.99) * 1000,
  }
}

/** Acquires one name, holds it for a tick, and releases it, in `inFlight` loops, for about `ms` milliseconds. Resolves to the number of grants, and the time. */
async function contend({ name, inFlight, ms, retryMs }) {
  let [holders, count] = [0, 0]
  const start = performance.now()
  const contendOnce = async () => {
    const release = await contender.wait(name, retryMs)
    if (++holders > 1) throw new Error(`${name} has two holders`)
    await nextTick()
    holders--
    await release()
    count++
  }
  await Promise.all(
    Array.from({ length: inFlight }, async () => {
      do await contendOnce()
      while (performance.now() < start + ms)
    }),
  )
  return { count, elapsedMs: performance.now() - start }
}

// The monotonic clock of the machine, which all processes share.
const microseconds = () => Number(process.hrtime.bigint()) / 1000

/** Ends the hold of the lock that this process has. @type {(value?: any) => void} */
let endHold = () => {}

/** Waits for a name, holds it until the parent requests its release, and releases it. */
async function join({ name, retryMs }) {
  const release = await contender.wait(name, retryMs)
  const held = new Promise((resolve) => (endHold = resolve))
  process.send?.({ got: microseconds() })
  await held
  const releasing = microseconds()
  await release()
  process.send?.({ releasing })
}

const tasks = {
  pair: (load) => measure(contender.pair, load),
  tryHeld: (load) => measure(contender.tryHeld, load),
  take: ({ count, prefix }) => Promise.all(Array.from({ length: count }, (_, i) => contender.take(prefix + i))),
  contend,
  join,
  release: () => endHold(),
  ...leases(contender),
  ...service(contender),
  async close() {
    await contender.close()
    process.disconnect()
  },
}

process.on('message', async (/** @type {any} */ { what, ...load }) => {
  const result = await tasks[what](load)
  // Waiters report what happens instead.
  if (what !== 'join' && what !== 'release' && process.connected) process.send?.(result ?? 'done')
})
// Without this a driver would try to reconnect for ever after the parent has ended.
process.on('disconnect', () => process.exit())
process.send?.('ready')
