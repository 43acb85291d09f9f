// Redis stalls under load: cancelled calls are not executed later, and calls succeed again at once.
import { it } from 'node:test'
import { stall } from './soak/redis.mjs'

it('a stall of 20 s under 1 000 calls per second executes no cancelled call', { timeout: 90_000 }, async (t) => {
  await stall({ log: (result) => t.diagnostic(JSON.stringify(result)) })
})
