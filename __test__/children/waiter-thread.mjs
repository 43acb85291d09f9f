// A worker thread that waits for `n` whenever it gets a message.
import { parentPort } from 'node:worker_threads'
import { open } from './child.mjs'

const locks = await open({ onEvent: ({ type }) => type === 'waiting' && parentPort.postMessage({ waiting: true }) })
parentPort.on('message', async (as) => {
  const lock = await locks.acquire('n', { ttlMs: 60_000, waitMs: 60_000 })
  const { fencingToken: fence } = lock
  await lock.release()
  parentPort.postMessage({ served: { as, fence: String(fence) } })
})
parentPort.postMessage({ ready: true })
