// A Redis client for set-up code, without dependencies: one command per connection.
import net from 'node:net'

/**
 * Sends one inline command, whose words have no blanks. Resolves to the reply in RESP; rejects with an error reply.
 *
 * @param {number | string} port
 * @param {string} line
 * @returns {Promise<string>}
 */
export function redisCommand(port, line) {
  return new Promise((resolve, reject) => {
    const socket = net.connect({ host: '127.0.0.1', port: Number(port) })
    let reply = ''
    socket.setTimeout(5000, () => socket.destroy(new Error(`no reply to ${line}`)))
    socket.once('error', reject)
    socket
      .on('data', (data) => (reply += data))
      .once('close', () => (reply[0] === '-' ? reject(new Error(reply)) : resolve(reply)))
    // The server closes the connection after its reply, because the input has ended.
    socket.end(`${line}\r\n`)
  })
}
