// A DNS server of SRV and TXT records, which answers the lookups of this process.
import dgram from 'node:dgram'
import dns from 'node:dns'

const TXT = 16
const SRV = 33
const NO_SUCH_NAME = 3

const number = (value) => [value >> 8, value & 255]
const text = (value) => [value.length, ...Buffer.from(value)]
const labels = (name) => [...name.split('.').flatMap(text), 0]

/**
 * Starts a server, and makes it the one that `node:dns` asks. `close` restores the others.
 */
export async function startDns() {
  const socket = dgram.createSocket('udp4')
  /** SRV: by `_service._tcp.name`, hosts and ports. TXT: by name, the parts of each record. `lookups`: the names that were asked for. */
  const server = {
    srv: /** @type {Record<string, [host: string, port: number][]>} */ ({}),
    txt: /** @type {Record<string, string[][]>} */ ({}),
    isSilent: false,
    lookups: /** @type {string[]} */ ([]),
    async close() {
      dns.setServers(before)
      await /** @type {Promise<void>} */ (new Promise((resolve) => socket.close(() => resolve())))
    },
  }

  const records = (name, type) => {
    if (type === SRV)
      return server.srv[name]?.map(([host, port]) => [0, 0, 0, 0, ...number(port), ...labels(`${host}`)])
    return type === TXT ? server.txt[name]?.map((parts) => parts.flatMap(text)) : undefined
  }

  socket.on('message', (query, from) => {
    const parts = []
    let at = 12
    for (let length; (length = query[at]) !== 0; at += length + 1)
      parts.push(query.toString('latin1', at + 1, at + 1 + length))
    const [name, type, end] = [parts.join('.'), query.readUInt16BE(at + 1), at + 5]
    server.lookups.push(name)
    if (server.isSilent) return
    const answers = records(name, type)
    const code = answers || server.txt[name] || server.srv[name] ? 0 : NO_SUCH_NAME
    const flags = [0x85, 0x80 | code]
    const counts = [...number(1), ...number(answers?.length ?? 0), 0, 0, 0, 0]
    // The name of a record is that of the question, at offset 12. Then type, class, 60 s, and the data.
    const body = (answers ?? []).flatMap((data) => [
      0xc0,
      12,
      ...number(type),
      0,
      1,
      0,
      0,
      0,
      60,
      ...number(data.length),
      ...data,
    ])
    const head = [...query.subarray(0, 2), ...flags, ...counts, ...query.subarray(12, end)]
    socket.send(Buffer.from([...head, ...body]), from.port, from.address)
  })
  await /** @type {Promise<void>} */ (new Promise((resolve) => socket.bind(0, '127.0.0.1', () => resolve())))
  const before = dns.getServers()
  dns.setServers([`127.0.0.1:${socket.address().port}`])
  return server
}
