// Executes requests of the test, which limits the threads or the file descriptors of this process meanwhile.
import { open, report, requests } from './child.mjs'

/** @type {Awaited<ReturnType<typeof open>> | undefined} */
let locks
/** @param {import('../../index.js').LockError} error */
const reasonOf = ({ code, retryable, message }) => ({ code, retryable, message })
report({ ready: true })
for await (const request of requests()) {
  if (request === 'connect') {
    const outcome = await open().then((service) => ((locks = service), 'connected'), reasonOf)
    report({ outcome })
  }
  if (request === 'use') {
    const outcome = await locks?.using('name', (lock) => lock.isHeld).catch(reasonOf)
    report({ used: outcome })
  }
}
await locks?.close()
