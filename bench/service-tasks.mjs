// What a contender's process does for the part about a service: an HTTP server that changes an order under its lock.
import { createServer } from 'node:http'
import { monitorEventLoopDelay, performance } from 'node:perf_hooks'
import { setImmediate as nextTick } from 'node:timers/promises'

/** The timer whose delay is measured, in milliseconds. */
const TIMER_MS = 1
/** The body of an order. */
const LINES = Array.from({ length: 10 }, (_, i) => ({ article: `article-${i}`, count: i, price: 9.99 }))

export function service(contender) {
  const orders = new Map()
  const changing = new Set()

  /** Reads, changes and writes an order. Throws when another request changes it at the same time. */
  async function change(id, amount) {
    if (changing.has(id) && !contender.hasNoLock) throw new Error(`order ${id} has two holders`)
    changing.add(id)
    const order = JSON.parse(orders.get(id) ?? JSON.stringify({ id, total: 0, changes: 0, lines: LINES }))
    // A query of a database would be here.
    await nextTick()
    order.total += amount
    order.changes++
    orders.set(id, JSON.stringify(order))
    changing.delete(id)
    return order
  }

  async function handle(request, response) {
    const chunks = []
    for await (const chunk of request) chunks.push(chunk)
    const { amount } = JSON.parse(Buffer.concat(chunks).toString())
    const id = request.url.slice(1)
    const order = await contender.using(`order:${id}`, () => change(id, amount))
    const body = JSON.stringify(order)
    response.writeHead(200, { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body) }).end(body)
  }

  let observed
  return {
    /** Starts the server. Resolves to its address. */
    async serve() {
      const server = createServer((request, response) =>
        handle(request, response).catch((error) => {
          console.error(error)
          response.writeHead(500).end()
        }),
      )
      await new Promise((resolve) => server.listen(0, '127.0.0.1', () => resolve(undefined)))
      return server.address()
    },
    /** Starts to observe the process: its CPU, its event loop, and how late its timers are. */
    observe() {
      const [cpu, loop] = [process.cpuUsage(), performance.eventLoopUtilization()]
      const delay = monitorEventLoopDelay({ resolution: TIMER_MS })
      delay.enable()
      observed = () => {
        delay.disable()
        const { user, system } = process.cpuUsage(cpu)
        const { active } = performance.eventLoopUtilization(loop)
        // The intervals between two timers, in ns.
        return { cpuUs: user + system, loopUs: active * 1000, delayUs: delay.percentile(99) / 1000 - TIMER_MS * 1000 }
      }
    },
    observed: () => observed(),
  }
}
