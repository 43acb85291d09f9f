// Acquires a lock, aborts the call on request, and has nothing else that keeps the process alive.
import { LockService } from '../../index.js'

const locks = await LockService.connect(process.argv[2], { storeTimeoutMs: 20_000 })
const abort = new AbortController()
process.on('message', (message) => {
  if (message === 'abort') return abort.abort(new Error('enough'))
  locks.acquire('aborted', { ttlMs: 600_000, signal: abort.signal }).catch((error) => {
    process.send?.(error.message, () => process.disconnect())
  })
})
// The server has the script from here on: the next attempt needs one request.
await (await locks.acquire('warm-up')).release()
process.send?.('ready')
