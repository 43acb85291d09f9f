// Waits for a lock, is told to give up, and has nothing else to do then.
import { LockService } from '../../index.js'

const locks = await LockService.connect(process.argv[2], { storeTimeoutMs: 20_000 })
const abort = new AbortController()
process.on('message', (message) => {
  if (message === 'abort') return abort.abort(new Error('enough'))
  locks.acquire('parting', { ttlMs: 600_000, signal: abort.signal }).catch((error) => {
    process.send(error.message, () => process.disconnect())
  })
})
// The server knows the script from here on: the next request does its work without an answer in between.
await (await locks.acquire('warm-up')).release()
process.send('ready')
