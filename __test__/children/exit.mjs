// Ends in one of many ways while locks are held, asked for or given back; the test looks at how that went.
import { block, open, report, task } from './child.mjs'

const names = (count) => Array.from({ length: count }, (_, index) => `${task.name}:${index}`)
const hold = (locks, count, options) => Promise.all(names(count).map((name) => locks.acquire(name, options)))

const ways = {
  // Nothing left to do but to renew.
  async renewing() {
    const locks = await open({ onEvent: ({ type }) => type === 'renewed' && renewed++ })
    let renewed = 0
    const held = await hold(locks, 20, { ttlMs: 900 })
    for (const lock of held) lock.signal.addEventListener('abort', () => report({ aborted: lock.name }))
    while (renewed < 20) await new Promise((resolve) => setTimeout(resolve, 20))
  },
  // The gist's lease, which nobody releases.
  async gist() {
    const locks = await open()
    report({ acquired: await locks.acquireLock(task.name, 60) })
  },
  // Subscribed, but no call outstanding any more.
  async waited() {
    const locks = await open()
    await hold(locks, 3, { ttlMs: 60_000 })
    const waits = names(3).map((name) => locks.acquire(name, { waitMs: 200 }).catch((error) => error.code))
    report({ codes: await Promise.all(waits) })
  },
  async closed() {
    const locks = await open()
    await hold(locks, 20, { ttlMs: 60_000 })
    await locks.close()
  },
  // Calls that nobody waits for: they are carried out all the same.
  async unawaited() {
    const locks = await open()
    for (const name of names(50)) locks.acquire(name, { ttlMs: 60_000 }).then((lock) => lock.release())
  },
  // In the middle of everything.
  async exit() {
    const locks = await open()
    // So short that some are lost now and then, on their way here or later.
    const held = await Promise.allSettled(names(20).map((name) => locks.acquire(name, { ttlMs: 90 })))
    for (const { value } of held) value?.signal.addEventListener('abort', () => {})
    const busy = () => {
      locks.acquire(`${task.name}:${Math.trunc(Math.random() * 60)}`, { ttlMs: 30, waitMs: 50 }).then(
        (lock) => lock.release().then(busy, busy),
        busy,
      )
    }
    for (let index = 0; index < 100; index++) busy()
    await new Promise((resolve) => setTimeout(resolve, task.afterMs))
    locks.close()
    process.exit(7)
  },
  async throws() {
    const locks = await open()
    await hold(locks, 20, { ttlMs: 900 })
    for (const name of names(20)) locks.acquire(name, { waitMs: Infinity })
    throw new Error('on purpose')
  },
  // Ended from outside, with and without a say in it.
  async terminated() {
    const locks = await open()
    await hold(locks, 20, { ttlMs: 900 })
    for (const name of names(20)) locks.acquire(name, { waitMs: Infinity })
    report({ ready: true })
  },
  async graceful() {
    const locks = await open()
    await hold(locks, 20, { ttlMs: 60_000 })
    const keepAlive = setInterval(() => {}, 1000)
    process.once('SIGTERM', async () => {
      clearInterval(keepAlive)
      await locks.close()
    })
    report({ ready: true })
  },
  // Exit hooks run after the event loop has ended, and may still call.
  async hooks() {
    const locks = await open()
    // The lease is renewed in time although the machine may stand still for a second.
    const [lock] = await hold(locks, 1, { ttlMs: 2500 })
    process.on('exit', () => {
      block(3500)
      report({ isHeld: lock.isHeld })
      lock.release()
      locks.acquire(`${task.name}:late`)
    })
  },
}

process.on('unhandledRejection', (error) => report({ unhandled: String(error) }))
await ways[task.way]()
