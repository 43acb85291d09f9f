// Loads the addon in worker threads, with and without loading it in the main thread.
import { once } from 'node:events'
import { Worker } from 'node:worker_threads'
import { report, task } from './threads-child.mjs'

const worker = (role) =>
  new Worker(new URL('thread.mjs', import.meta.url), { workerData: { ...task, role }, argv: [process.argv[2]] })
const nextMessage = async (thread) => (await once(thread, 'message'))[0]

const scenarios = {
  // Renewals are in progress, and a loss would fire an event in the worker.
  async midLease() {
    const thread = worker('hold')
    await nextMessage(thread)
    report({ code: await thread.terminate() })
  },
  async midWait() {
    const { open } = await import('./child.mjs')
    const locks = await open()
    const lock = await locks.acquire(task.name)
    const thread = worker('wait')
    await nextMessage(thread)
    await thread.terminate()
    // The terminated waiter does not block later acquisitions.
    await lock.release()
    await (await locks.acquire(task.name)).release()
    await locks.close()
  },
  async midCalls() {
    for (let round = 0; round < 5; round++) {
      const thread = worker('load')
      await nextMessage(thread)
      await thread.terminate()
    }
  },
  // The main thread never loads the addon: the end of each worker may unload the library.
  async reload() {
    for (let round = 0; round < 10; round++) {
      const thread = worker(['hold', 'acquire', 'exit', 'end'][round % 4])
      const ended = once(thread, 'exit')
      await nextMessage(thread)
      if (round % 4 === 0) thread.terminate()
      await ended
    }
  },
  async together() {
    const { open } = await import('./child.mjs')
    const locks = await open()
    const counter = new Int32Array(new SharedArrayBuffer(4))
    const threads = Array.from({ length: 3 }, () => worker('count'))
    const ended = threads.map((thread) => once(thread, 'exit'))
    for (const thread of threads) thread.postMessage(counter)
    const { count } = await import('./thread-counter.mjs')
    await count(locks, counter, task)
    await Promise.all(ended)
    report({ count: counter[0] })
    await locks.close()
  },
}

await scenarios[task.scenario]()
report({ done: true })
