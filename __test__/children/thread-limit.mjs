// Executes requests of the test, which limits the threads of this process meanwhile.
import { open, report, requests } from './child.mjs'

/** @type {Awaited<ReturnType<typeof open>> | undefined} */
let locks
report({ ready: true })
for await (const request of requests()) {
  if (request === 'connect') {
    const outcome = await open().then(
      (service) => ((locks = service), 'connected'),
      ({ code, retryable, message }) => ({ code, retryable, message }),
    )
    report({ outcome })
  }
  if (request === 'use') {
    const outcome = await locks?.using('name', (lock) => lock.isHeld).catch(({ message }) => message)
    report({ used: outcome })
  }
}
await locks?.close()
