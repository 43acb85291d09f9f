// A process with waiters of one contender. Each waiter acquires the same name, holds it for a while, and releases it. It reports
// the times of the grant and of the release on the machine's monotonic clock, which all processes share.
import { setTimeout as sleep } from 'node:timers/promises'

const [, , module, url, retryMs] = process.argv
const { connect } = await import(`./contenders/${module}.mjs`)
const contender = await connect(url)

const microseconds = () => Number(process.hrtime.bigint()) / 1000

process.on('message', async ({ leastMs, mostMs }) => {
  const release = await contender.wait('n', retryMs === '' ? undefined : Number(retryMs))
  process.send({ got: microseconds() })
  // A random time, so that no contender's polling interval is in phase with it.
  await sleep(leastMs + Math.random() * (mostMs - leastMs))
  const releasing = microseconds()
  await release()
  process.send({ releasing })
})
process.send({ ready: true })
