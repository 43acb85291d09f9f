// An instance with a schedule and a clock that differs from that of the others. Calls its job at each tick of its own clock.
import { setTimeout as sleep } from 'node:timers/promises'
import { stepLog } from './step-log.mjs'
import { startProcess } from './trial.mjs'
import { TICKERS } from './ticks.mjs'

const [, , ticker, task] = process.argv
const { id, url, name, file, skewMs, firstAt, intervalMs, ticks } = JSON.parse(task)
const realNow = Date.now
// The libraries of this process have its clock, too.
Date.now = () => realNow() + skewMs

const log = stepLog(file, id)
const JOB_MS = 50
const job = async (tick) => {
  log(`run-${tick}`)
  await sleep(JOB_MS)
}

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
      const started = startProcess(argv({ url, name }, [process.execPath, '-e', JOB(tick)]), { isCommand: true })
      await started.ended
    }
  },
}

/** The code of a command that does the job. */
const JOB = (tick) => `
  import(${JSON.stringify(new URL('step-log.mjs', import.meta.url).href)}).then(({ stepLog }) => {
    stepLog(${JSON.stringify(file)}, ${JSON.stringify(id)})('run-${tick}')
    setTimeout(() => {}, ${JOB_MS})
  })`

const { way, argument } = TICKERS[ticker]
const call = await ways[way](argument)
process.on('disconnect', () => process.exit())
log('ready')
for (let tick = 0; tick < ticks; tick++) {
  const at = firstAt + tick * intervalMs - skewMs
  await sleep(Math.max(0, at - realNow()))
  // A busy name is an error in some libraries.
  void call(tick).catch(() => {})
}
await sleep(intervalMs)
process.exit()
