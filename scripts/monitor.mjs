// Records the commands that clients send to a Redis server, read from MONITOR. Commands inside scripts are counted separately.
import net from 'node:net'

export class Monitor {
  /**
   * The commands of clients since the last `reset`: `"EVALSHA" …`.
   *
   * @type {string[]}
   */
  commands = []
  /** The number of commands that scripts executed. */
  scriptCommands = 0
  #socket
  #rest = ''
  #ready = () => {}

  /** @param {number} port */
  constructor(port) {
    this.#socket = net
      .connect(port, '127.0.0.1')
      .setEncoding('utf8')
      .on('error', () => {})
  }

  /** @param {number} port */
  static async open(port) {
    const monitor = new Monitor(port)
    const ready = /** @type {Promise<void>} */ (new Promise((resolve) => (monitor.#ready = resolve)))
    monitor.#socket.on('data', (text) => monitor.#receive(String(text)))
    monitor.#socket.write('MONITOR\r\n')
    await ready
    return monitor
  }

  /** @param {string} text */
  #receive(text) {
    const lines = (this.#rest + text).split('\r\n')
    this.#rest = lines.pop() ?? ''
    for (const line of lines) {
      const match = /^\+[\d.]+ \[\d+ (\S+)\] (.*)$/.exec(line)
      if (!match) this.#ready()
      else if (match[1] === 'lua') this.scriptCommands++
      else this.commands.push(match[2])
    }
  }

  reset() {
    this.commands = []
    this.scriptCommands = 0
  }

  close() {
    this.#socket.destroy()
  }
}
