// One leader of four processes: elected, killed, replaced, and asked to resign.
//
//   node examples/leader.mjs          starts four workers, and shows what happens when leaders end
//
// Uses the store in HOLDFAST_URL, by default the embedded store, which all processes of this user on this machine share.
import { fork } from 'node:child_process'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { LockService } from '../index.js' // 'holdfast' in your project

const NAME = 'example:leader'

if (process.argv[2] === 'worker') await work()
else await demonstrate()

/** A worker: a candidate for its whole life. */
async function work() {
  const locks = await LockService.connect()
  const election = locks.elect(NAME, { ttlMs: '5s' }, async ({ signal, term }) => {
    process.send?.(`leads in term ${term}`)
    // The work of a leader. It must end when the signal aborts: then another process leads.
    while (!signal.aborted) await sleep(1000, undefined, { signal }).catch(() => {})
  })
  process.on('message', (message) => void (message === 'resign' && election.resign()))
  process.once('SIGTERM', () => locks.close({ drainMs: '10s' }))
  await election.done
  process.disconnect()
}

async function demonstrate() {
  /** @type {((pid: number) => void) | undefined} */
  let onLeader
  /** @type {Map<number, import('node:child_process').ChildProcess>} */
  const workers = new Map()
  const start = () => {
    const worker = fork(fileURLToPath(import.meta.url), ['worker'])
    const pid = Number(worker.pid)
    worker.on('message', (text) => {
      console.log(`${pid} ${text}`)
      onLeader?.(pid)
    })
    worker.on('exit', () => workers.delete(pid))
    workers.set(pid, worker)
  }
  /** Does something, and resolves to the next leader. @param {() => void} action @returns {Promise<number>} */
  const nextLeader = (action) =>
    new Promise((resolve) => {
      onLeader = resolve
      action()
    })

  for (let i = 0; i < 3; i++) start()
  const first = await nextLeader(start)
  const second = await nextLeader(() => workers.get(first)?.kill('SIGKILL'))
  console.log(`${first} was killed, and replaced after its lease of 5 s (on ZooKeeper with its session, 10 to 12 s)`)
  start()
  await nextLeader(() => workers.get(second)?.send('resign'))
  console.log(`${second} resigned, and is a candidate again`)
  const ends = Array.from(workers.values(), (worker) => new Promise((resolve) => worker.once('exit', resolve)))
  for (const worker of workers.values()) worker.kill('SIGTERM')
  await Promise.all(ends)
}
