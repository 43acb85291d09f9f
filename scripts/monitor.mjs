// Records the commands that clients send to a Redis server, read from MONITOR. Commands inside scripts are counted separately.
import net from 'node:net'

export class Monitor {
  /** The commands of clients since the last `reset`: `"EVALSHA" …`. */
  commands = []
  /** The number of commands that scripts executed. */
  scriptCommands = 0
  #socket
  #rest = ''

  static async open(port) {
    const monitor = new Monitor()
    monitor.#socket = net
      .connect(port, '127.0.0.1')
      .setEncoding('utf8')
      .on('error', () => {})
    const ready = new Promise((resolve) => (monitor.#ready = resolve))
    monitor.#socket.on('data', (text) => monitor.#receive(text))
    monitor.#socket.write('MONITOR\r\n')
    await ready
    return monitor
  }

  #ready

  #receive(text) {
    const lines = (this.#rest + text).split('\r\n')
    this.#rest = lines.pop()
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
