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
  const { rss, heapTotal, heapUsed } = process.memoryUsage()
  // Room in the JavaScript heap comes and goes by its own rules: what counts of it is what is used.
  return { used: rss - heapTotal + heapUsed, heapUsed }
}

/** Does something for each of so many names, 100 at a time. */
async function many(count, work) {
  const done = []
  while (done.length < count) {
    const next = Array.from({ length: Math.min(100, count - done.length) }, (_, i) => `lease:${done.length + i}`)
    done.push(...(await Promise.all(next.map(work))))
  }
  return done
}

const tasks = {
  async hold({ count, ttlMs }) {
    // What calls in flight need is no part of what a held lease needs: it is there before the first.
    await many(count, (name) => contender.pair(name))
    const before = await memory()
    held.push(...(await many(count, (name) => contender.hold(name, ttlMs))))
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
