// A process that is a candidate for the leadership of a name, with one of the libraries. SIGUSR2 ends its leadership normally.
import { setTimeout as sleep } from 'node:timers/promises'
import { stepLog, work } from './step-log.mjs'

const [, , kind, task] = process.argv
const { id, url, name, ttlMs, file } = JSON.parse(task)
const log = stepLog(file, id)
let resign = async () => {}

/** A candidate that calls `lead` again and again. `lead` runs the job if the name is free. */
async function poll(lead) {
  for (;;) {
    // After a leadership the others have time to begin theirs. A busy name is tried again after the library's own pause.
    const pauseMs = await lead().then(
      () => 1000,
      () => 200,
    )
    await sleep(pauseMs)
  }
}

/** A job that `resign` ends. */
function resignable(isLost = () => false) {
  let isEnded = false
  resign = async () => void (isEnded = true)
  return work(log, () => isEnded || isLost())
}

const kinds = {
  async elect() {
    const { LockService } = await import('../../index.js')
    const locks = await LockService.connect(url)
    const election = locks.elect(name, { ttlMs }, ({ signal }) => work(log, () => signal.aborted))
    resign = () => election.resign()
  },

  // As the example in etcd3's documentation, which campaigns again 5 s after an error.
  async campaign() {
    const { Etcd3 } = await import('etcd3')
    const election = new Etcd3({ hosts: url }).election(name, ttlMs / 1000)
    const run = () => {
      const campaign = election.campaign(id)
      let isEnded = false
      let job = Promise.resolve()
      campaign.on('elected', () => (job = work(log, () => isEnded)))
      campaign.on('error', () => {
        if (!isEnded) setTimeout(run, 1000)
        isEnded = true
      })
      resign = async () => {
        isEnded = true
        await job
        await campaign.resign()
      }
    }
    run()
  },

  async decorator() {
    const { startNest } = await import('./nest.mjs')
    const { run } = await startNest(url, { key: name, ttl: ttlMs }, () => resignable())
    await poll(run)
  },

  async using() {
    const { startNest } = await import('./nest.mjs')
    const { redlock } = await startNest(url, { key: name, ttl: ttlMs }, () => {})
    await poll(() => redlock.using(name, (signal) => resignable(() => signal?.aborted === true), ttlMs))
  },
}

process.on('SIGUSR2', () => void resign())
process.on('disconnect', () => process.exit())
await kinds[kind]()
