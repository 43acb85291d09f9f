// One contender in a process of its own, told by its parent what to measure.
import { performance } from 'node:perf_hooks'

const [, , module, url] = process.argv
const { connect } = await import(`./contenders/${module}.mjs`)
const contender = await connect(url)
const prefix = `bench-${module}-${process.pid}-`

/** Runs `once(name)` in `inFlight` loops, each on a name of its own, for about `ms`. */
async function measure(once, { inFlight, ms }) {
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
  process.send(await measure(contender[what], load))
})
process.send('ready')
