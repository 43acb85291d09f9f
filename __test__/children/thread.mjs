// One worker thread.
import { once } from 'node:events'
import { parentPort, workerData } from 'node:worker_threads'
import { open } from './child.mjs'
import { count } from './thread-counter.mjs'

const { name, role } = workerData
const locks = await open()
const ready = () => parentPort?.postMessage('ready')

const roles = {
  async hold() {
    const lock = await locks.acquire(`${name}:${Math.random()}`, { ttlMs: 400 })
    lock.signal.addEventListener('abort', () => {})
    setInterval(() => {}, 1000)
    ready()
  },
  async wait() {
    locks.acquire(name, { ttlMs: 1000, waitMs: Infinity })
    // It is granted the lock where that of the main thread ended with its session: on a machine that stands still.
    while (locks.stats().waiting + locks.stats().held === 0) await new Promise((resolve) => setTimeout(resolve, 5))
    ready()
  },
  async load() {
    const run = async (key) => {
      for (;;) await (await locks.acquire(`${name}:${key}`, { waitMs: Infinity })).release()
    }
    for (let index = 0; index < 20; index++) run(index % 12)
    setTimeout(ready, 100)
  },
  async acquire() {
    await (await locks.acquire(name)).release()
    ready()
  },
  async exit() {
    await locks.acquire(`${name}:${Math.random()}`, { ttlMs: 400 })
    ready()
    process.exit()
  },
  // Ends by itself with a lease that is renewed until then.
  async end() {
    await locks.acquire(`${name}:${Math.random()}`, { ttlMs: 400 })
    ready()
  },
  async count() {
    const [counter] = await once(/** @type {import('node:worker_threads').MessagePort} */ (parentPort), 'message')
    await count(locks, counter, workerData)
    await locks.close()
  },
}
await roles[role]()
