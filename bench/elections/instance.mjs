// An instance with a schedule and a clock that differs from that of the others. Calls its job at each tick of its own clock.
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { jobOf, stepLog } from './step-log.mjs'
import { startProcess } from './trial.mjs'
import { TICKERS } from './ticks.mjs'

const JOB = fileURLToPath(new URL('job.mjs', import.meta.url))
const [, , ticker, task] = process.argv
const { id, url, name, file, skewMs, intervalMs, ticks } = JSON.parse(task)
const realNow = Date.now
// The libraries of this process have its clock, too.
Date.now = () => realNow() + skewMs

const log = stepLog(file, id)
const job = (tick) => jobOf(log, tick)

const ways = {
  async oncePer(periodMs) {
    const { LockService } = await import('../../index.js')
    const locks = await LockService.connect(url)
    return (tick) => locks.oncePer(name, { periodMs }, () => job(tick))
  },

  async tryUsing() {
    const { LockService } = await import('../../index.js')
    const locks = await LockService.connect(url)
    return (tick) => locks.tryUsing(name, () => job(tick))
  },

  async decorator(options) {
    const { startNest } = await import('./nest.mjs')
    const { run } = await startNest(url, { key: name, ttl: 30_000, ...options }, job)
    return run
  },

  async command(argv) {
    return async (tick) => {
      const started = startProcess(argv({ url, name }, [process.execPath, JOB, id, file, String(tick)]), {
        isCommand: true,
      })
      await started.ended
    }
  },
}

const { way, argument } = TICKERS[ticker]
const call = await ways[way](argument)
process.on('disconnect', () => process.exit())
process.send?.('ready')
/** The true time of the first tick. @type {number} */
const firstAt = await new Promise((resolve) => process.once('message', resolve))
for (let tick = 0; tick < ticks; tick++) {
  const at = firstAt + tick * intervalMs - skewMs
  await sleep(Math.max(0, at - realNow()))
  // A busy name is an error in some libraries.
  call(tick).catch(() => {})
}
// The last calls may wait, or start a command.
await sleep(2000)
process.exit()
