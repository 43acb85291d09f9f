// One contender in a process of its own that holds many renewing leases, and tells what they cost it.
import { setTimeout as sleep } from 'node:timers/promises'

const [, , module, url] = process.argv
const { connect } = await import(`./contenders/${module}.mjs`)
const contender = await connect(url)
const held = []

/** What the process has in memory, when what is garbage is gone. */
async function memory() {
  for (let i = 0; i < 3; i++) {
    globalThis.gc()
    await sleep(50)
  }
  const { rss, heapUsed } = process.memoryUsage()
  return { rss, heapUsed }
}

const tasks = {
  async hold({ count, ttlMs }) {
    const before = await memory()
    // Some at a time: what calls in flight need is no part of what a held lease needs.
    while (held.length < count) {
      const next = Array.from({ length: Math.min(100, count - held.length) }, (_, i) => `lease:${held.length + i}`)
      held.push(...(await Promise.all(next.map((name) => contender.hold(name, ttlMs)))))
    }
    return before
  },
  memory,
  async watch({ ms }) {
    const cpu = process.cpuUsage()
    const start = performance.now()
    await sleep(ms)
    const { user, system } = process.cpuUsage(cpu)
    return { cpuPercent: (user + system) / 10 / (performance.now() - start), lost: contender.lost() }
  },
}

process.on('message', async ({ what, ...load }) => process.send(await tasks[what](load)))
process.send('ready')
