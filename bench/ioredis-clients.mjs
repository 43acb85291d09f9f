// The clients of all contenders on ioredis.
import { readFileSync } from 'node:fs'
import { Cluster, Redis } from 'ioredis'

/** Describes the settings of a contender on ioredis, by variant: as it comes, and with the commands of one tick joined. */
export const settingsOf = (name, setting) => ({
  '': setting,
  auto: `as ${name}, with \`enableAutoPipelining: true\`: more throughput, a slower single call`,
})

/** Opens a client for each URL of a target: of a server, of the nodes of a Cluster, or of the sentinels of a master. */
export function openClients({ urls, caFile }, variant) {
  const options = { enableAutoPipelining: variant === 'auto' }
  return urls.map((url) => {
    const [, scheme, hosts, path] = /^([\w+]+):\/\/([^/]+)\/?(.*)$/.exec(url) ?? []
    const nodes = hosts.split(',').map((address) => {
      const [host, port] = address.split(':')
      return { host, port: Number(port) }
    })
    if (scheme === 'redis+cluster') return new Cluster(nodes, options)
    if (scheme === 'redis+sentinel') return new Redis({ ...options, sentinels: nodes, name: path })
    return new Redis(url, { ...options, ...(caFile && { tls: { ca: readFileSync(caFile) } }) })
  })
}
