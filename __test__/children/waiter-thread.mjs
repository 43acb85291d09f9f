// A worker thread. Each message starts a waiter for `n`.
import { parentPort } from 'node:worker_threads'
import { open } from './child.mjs'

const locks = await open({ onEvent: ({ type }) => type === 'waiting' && parentPort?.postMessage({ waiting: true }) })
parentPort?.on('message', async (label) => {
  const lock = await locks.acquire('n', { ttlMs: 60_000, waitMs: 60_000 })
  const { fencingToken: fence } = lock
  await lock.release()
  parentPort?.postMessage({ served: { label, fence: String(fence) } })
})
parentPort?.postMessage({ ready: true })
