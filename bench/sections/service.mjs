// A service as in production: an HTTP server that changes an order per request, under the order's lock. The server and the process
// that sends the requests are separate, and share the machine with the Redis server.
import { Process, startContenders } from '../contender-process.mjs'
import { measureAll } from '../measure.mjs'
import { onStore, redis } from './stores.mjs'

const CONTENDERS = ['holdfast', 'redlock', 'redlock-auto', 'redis-semaphore', 'redis-semaphore-auto', 'no-lock']
const IN_FLIGHT = 200
/** The shortest time of a cell. In a shorter one V8 is still optimising a server, and has too few timers, whose delay is measured. */
const LEAST_MS = { quick: 100, usual: 1000 }
/** The requests are for random orders. With the smaller number one request of five or so has to wait for another one. */
const ORDERS = { '200 in flight, 1 000 orders': 1000, '200 in flight, 100 000 orders': 100_000 }

export async function service(timing) {
  return onStore(redis, async ({ target, probe, title }) => {
    const generator = await Process.start('the load generator', 'load-generator.mjs', [])
    const ports = new Map()
    const start = async (names) => {
      const running = await startContenders(names, target)
      for (const contender of running) ports.set(contender.name, (await contender.ask({ what: 'serve' })).port)
      return running
    }
    const call = async (contender, load, ms) => {
      await contender.ask({ what: 'observe' })
      const port = ports.get(contender.name)
      const result = await generator.ask({
        port,
        inFlight: IN_FLIGHT,
        orders: ORDERS[load],
        ms: Math.max(ms, timing.quick ? LEAST_MS.quick : LEAST_MS.usual),
      })
      const { loopUs, cpuUs, delayUs } = await contender.ask({ what: 'observed' })
      return { ...result, loopUs: loopUs / result.count, cpuUs: cpuUs / result.count, delayUs }
    }
    const contenders = timing.chosen(CONTENDERS)
    const loads = Object.keys(ORDERS)
    const results = await measureAll({ contenders, target, loads, probe, start, call, ...timing })
    await generator.kill()
    const note =
      'Each request is a POST with a body of JSON: the server waits for the lock of one order, reads and writes the order, and ' +
      'answers with it. holdfast and redlock do this with `using`; redis-semaphore has no such call, and its lock is refreshed and ' +
      'released by hand. redlock and redis-semaphore try again after 1 ms, without a limit. `no-lock` is the service without locks. ' +
      'A cell lasts a second at least. The latency is that of the client; the timers of the server are late by its event-loop delay.'
    return { fields: [{ title: `HTTP service, ${title}`, note, one: 'request', floor: 'no-lock', results }] }
  })
}
