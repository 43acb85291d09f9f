// Ends in one of several ways while locks are held, requested or released. The test checks the exit.
import { block, open, report, task } from './child.mjs'

const names = (count) => Array.from({ length: count }, (_, index) => `${task.name}:${index}`)
const hold = (locks, count, options) => Promise.all(names(count).map((name) => locks.acquire(name, options)))

const scenarios = {
  // Only renewals are left.
  async renewing() {
    const locks = await open({ onEvent: ({ type }) => type === 'renewed' && renewed++ })
    let renewed = 0
    const held = await hold(locks, 20, { ttlMs: 6000 })
    for (const lock of held) lock.signal.addEventListener('abort', () => report({ aborted: lock.name }))
    while (renewed < 20) await new Promise((resolve) => setTimeout(resolve, 20))
  },
  // A lease of `acquireLock` that is not released.
  async gist() {
    const locks = await open()
    report({ acquired: await locks.acquireLock(task.name, 60) })
  },
  // A subscription is open, but no call is outstanding.
  async waited() {
    const locks = await open()
    await hold(locks, 3, { ttlMs: 60_000 })
    const waits = names(3).map((name) => locks.acquire(name, { waitMs: 3000 }).catch((error) => error.code))
    report({ codes: await Promise.all(waits) })
  },
  async closed() {
    const locks = await open()
    await hold(locks, 20, { ttlMs: 60_000 })
    await locks.close()
  },
  // Calls whose promises are not awaited: they are executed.
  async unawaited() {
    const locks = await open()
    for (const name of names(50)) locks.acquire(name, { ttlMs: 60_000 }).then((lock) => lock.release())
  },
  // `process.exit()` with calls in flight.
  async exit() {
    const locks = await open()
    // The ttl is so short that some leases are lost.
    const held = await Promise.allSettled(names(20).map((name) => locks.acquire(name, { ttlMs: 90 })))
    for (const each of held) if (each.status === 'fulfilled') each.value.signal.addEventListener('abort', () => {})
    const busy = () => {
      locks
        .acquire(`${task.name}:${Math.trunc(Math.random() * 60)}`, { ttlMs: 30, waitMs: 50 })
        .then((lock) => lock.release().then(busy, busy), busy)
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
  // Ended by a signal, without a handler and with one.
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
  // Exit hooks run after the event loop has ended, and may still make calls.
  async hooks() {
    const locks = await open()
    // The ttl leaves time for a renewal although the machine may stall for two seconds.
    const [lock] = await hold(locks, 1, { ttlMs: 4500 })
    process.on('exit', () => {
      block(5500)
      report({ isHeld: lock.isHeld })
      lock.release()
      locks.acquire(`${task.name}:late`)
    })
  },
}

process.on('unhandledRejection', (error) => report({ unhandled: String(error) }))
await scenarios[task.scenario]()
