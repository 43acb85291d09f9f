// Redis stands still under load: cancelled calls are not executed later, and service resumes at once.
import { it } from 'node:test'
import { stall } from './soak/redis.mjs'

it('a server that stands still for 20 s under 1 000 calls per second', { timeout: 90_000 }, async (t) => {
  await stall({ log: (result) => t.diagnostic(JSON.stringify(result)) })
})
