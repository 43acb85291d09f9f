// The process that sends requests to the HTTP server of a contender. It writes HTTP itself: a client library would need as much of
// the machine as the server.
import net from 'node:net'
import { percentile } from './report.mjs'

const BODY = JSON.stringify({ amount: 1 })

/** A connection with one request at a time. */
class Connection {
  #socket
  #settle = { resolve: (_body) => {}, reject: (_error) => {} }
  #received = ''

  static open(port) {
    const connection = new Connection()
    connection.#socket = net.connect(port, '127.0.0.1').setNoDelay(true).setEncoding('latin1')
    const fail = (error) => connection.#settle.reject(error ?? new Error('the server closed the connection'))
    connection.#socket
      .on('data', (text) => connection.#receive(text))
      .on('error', fail)
      .on('close', () => fail())
    return connection
  }

  #receive(text) {
    this.#received += text
    const end = this.#received.indexOf('\r\n\r\n')
    if (end < 0) return
    const length = Number(/content-length: (\d+)/i.exec(this.#received)?.[1] ?? 0)
    if (this.#received.length < end + 4 + length) return
    const [status, body] = [this.#received.slice(9, 12), this.#received.slice(end + 4)]
    this.#received = ''
    if (status === '200') this.#settle.resolve(body)
    else this.#settle.reject(new Error(`the server answered with ${status}`))
  }

  /** Changes an order. Resolves to the body of the response. */
  change(id) {
    const answered = new Promise((resolve, reject) => (this.#settle = { resolve, reject }))
    this.#socket.write(`POST /${id} HTTP/1.1\r\nhost: bench\r\ncontent-length: ${BODY.length}\r\n\r\n${BODY}`)
    return answered
  }

  close() {
    this.#settle.reject = () => {}
    this.#socket.destroy()
  }
}

process.on('message', async (/** @type {any} */ { port, inFlight, orders, ms }) => {
  const latencies = []
  const start = performance.now()
  const end = start + ms
  await Promise.all(
    Array.from({ length: inFlight }, async () => {
      const connection = Connection.open(port)
      let now = performance.now()
      // Each connection sends at least one request, also when the process stood still for the whole time.
      do {
        const id = Math.floor(Math.random() * orders)
        const order = JSON.parse(await connection.change(id))
        if (order.id !== String(id) || !(order.changes > 0)) throw new Error(`order ${id} was not changed`)
        const then = now
        now = performance.now()
        latencies.push(now - then)
      } while (now < end)
      connection.close()
    }),
  )
  const elapsed = performance.now() - start
  latencies.sort((a, b) => a - b)
  process.send?.({
    count: latencies.length,
    perSecond: (latencies.length / elapsed) * 1000,
    p50Us: percentile(latencies, 0.5) * 1000,
    p99Us: percentile(latencies, 0.99) * 1000,
  })
})
process.on('disconnect', () => process.exit())
process.send?.('ready')
