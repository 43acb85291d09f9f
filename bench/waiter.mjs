// A process of one contender's waiters. Each of them waits for the one name, holds it for a while, and releases it; when it
// got it and when it began to give it back, it tells on the machine's monotonic clock, which all processes share.
import { setTimeout as sleep } from 'node:timers/promises'

const [, , module, url, retryMs] = process.argv
const { connect } = await import(`./contenders/${module}.mjs`)
const contender = await connect(url)

const microseconds = () => Number(process.hrtime.bigint()) / 1000

process.on('message', async ({ leastMs, mostMs }) => {
  const release = await contender.wait('n', retryMs === '' ? undefined : Number(retryMs))
  process.send({ got: microseconds() })
  // By chance, so that no contender's pauses between its tries keep step with it.
  await sleep(leastMs + Math.random() * (mostMs - leastMs))
  const releasing = microseconds()
  await release()
  process.send({ releasing })
})
process.send({ ready: true })
