// A network with delay: a TCP proxy in a separate process, so that it does not use a contender's event loop.
//
// Node's timers have a resolution of 1 ms, and busy-polling would occupy a core. So a second thread sleeps until the next chunk
// is due (`Atomics.wait` sleeps for fractions of a millisecond) and then wakes the event loop, which forwards all due chunks.
import { fork } from 'node:child_process'
import net from 'node:net'
import { fileURLToPath } from 'node:url'
import { isMainThread, parentPort, Worker, workerData } from 'node:worker_threads'
import { median } from './report.mjs'
import { RedisConnection } from './probes.mjs'

const FILE = fileURLToPath(import.meta.url)
/** How often the pause is corrected, and how many round trips each measurement has. */
const CORRECTIONS = 4
const TRIPS = 300
/** The limit for the correction of the proxy's own delay, one way: a larger delay comes from a busy machine and is temporary. */
const MOST_OWN_MS = 0.16

/** Starts a proxy to `server` whose round trips take `extraMs` longer than without it. */
export async function openDelayProxy(server, extraMs) {
  const child = fork(FILE, [String(server.port)])
  const receive = () =>
    new Promise((resolve, reject) =>
      child.once('message', resolve).once('exit', () => reject(new Error('the delay proxy ended'))),
    )
  const { port } = await receive()
  const delay = (oneWayMs) => child.send({ oneWayMs })
  const bare = await roundTrip(server.port)
  // The proxy's own delay is part of `extraMs`, so it sleeps for less.
  let ownMs = 0
  for (let correction = 0; correction < CORRECTIONS; correction++) {
    delay(extraMs / 2 - ownMs)
    const tooMuch = (await roundTrip(port)) - bare - extraMs
    ownMs = Math.min(Math.max(ownMs + tooMuch / 2, 0), MOST_OWN_MS)
  }
  delay(extraMs / 2 - ownMs)
  return {
    url: `redis://127.0.0.1:${port}`,
    bareMs: bare,
    tripMs: () => roundTrip(port),
    close: () => new Promise((resolve) => child.removeAllListeners('exit').once('exit', resolve).kill('SIGKILL')),
  }
}

/** Measures the median round trip of a PING, in milliseconds. */
async function roundTrip(port) {
  const connection = await RedisConnection.open(port)
  const times = []
  for (let trip = 0; trip < TRIPS; trip++) {
    const start = performance.now()
    await connection.ping()
    times.push(performance.now() - start)
  }
  connection.close()
  return median(times)
}

/** The delayed chunks of all connections. The delay is the same for all: the first one is due first. */
class Queue {
  #waiting = []
  #first = 0
  #alarm
  oneWayMs = 0

  constructor(alarm) {
    this.#alarm = alarm
  }

  push(socket, chunk) {
    this.#waiting.push({ due: performance.now() + this.oneWayMs, socket, chunk })
    if (this.#waiting.length - this.#first === 1) this.#alarm(this.oneWayMs)
  }

  /** Forwards the due chunks, and sets the alarm for the next one. */
  flush() {
    const now = performance.now()
    const touched = new Set()
    while (this.#first < this.#waiting.length && this.#waiting[this.#first].due <= now) {
      const { socket, chunk } = this.#waiting[this.#first++]
      if (!touched.has(socket)) socket.cork()
      touched.add(socket)
      if (chunk) socket.write(chunk)
      else socket.end()
    }
    for (const socket of touched) socket.uncork()
    if (this.#first < this.#waiting.length) this.#alarm(this.#waiting[this.#first].due - now)
    else [this.#waiting, this.#first] = [[], 0]
  }
}

function serve(port) {
  // [0]: the number of alarms so far. [1]: the delay of the latest one, in µs.
  const shared = new Int32Array(new SharedArrayBuffer(8))
  const worker = new Worker(FILE, { workerData: shared })
  const queue = new Queue((ms) => {
    Atomics.store(shared, 1, Math.max(0, Math.round(ms * 1000)))
    Atomics.add(shared, 0, 1)
    Atomics.notify(shared, 0)
  })
  worker.on('message', () => queue.flush())
  process.on('message', ({ oneWayMs }) => (queue.oneWayMs = oneWayMs)).on('disconnect', () => process.exit())
  const listener = net.createServer((client) => {
    const server = net.connect(port, '127.0.0.1')
    const ends = [client, server]
    for (const [i, socket] of ends.entries()) {
      socket.setNoDelay(true).on('error', () => {})
      // The end of a connection is delayed, too.
      socket.on('data', (chunk) => queue.push(ends[1 - i], chunk)).on('close', () => queue.push(ends[1 - i]))
    }
  })
  listener.listen(0, '127.0.0.1', () => process.send?.(listener.address()))
}

/** @param {Int32Array} shared */
function sleepAndWake(shared) {
  for (let seen = 0; ;) {
    // Returns at once if an alarm has been set already.
    Atomics.wait(shared, 0, seen)
    seen = Atomics.load(shared, 0)
    const pause = Atomics.load(shared, 1) / 1000
    // Only a new alarm changes this value, and none is set before this one is due.
    if (pause > 0) Atomics.wait(shared, 0, seen, pause)
    parentPort?.postMessage('due')
  }
}

if (!isMainThread && workerData instanceof Int32Array) sleepAndWake(workerData)
else if (process.send && process.argv[1] === FILE) serve(Number(process.argv[2]))
