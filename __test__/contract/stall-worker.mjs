// Holds a lock while its event loop is blocked, and then reports the state of the lock.
import { parentPort, workerData } from 'node:worker_threads'
import { LockService } from '../../index.js'

const { target, connect, acquire, gate } = workerData
const service = await LockService.connect(target, connect)
const lock = await service.acquire('stalled', acquire)
const { signal } = lock
parentPort?.postMessage('held')
// The main thread opens the gate.
Atomics.wait(gate, 0, 0, 60_000)
const { isHeld } = lock
parentPort?.postMessage({ isHeld, isAborted: signal.aborted })
await service.close()
