// Answers the questions of the native core: the login of a new connection, and the DNS records of a name.
import dns from 'node:dns'
import { askForLogin, reasonOf } from './connect.js'
import type { LoginSource } from './connect.js'
import { native } from './native.js'

/** @internal A service, a name, and how long the answer may take. */
export type NameQuestion = [service: string, name: string, limitMs: number]

/** The longest time that one request of a resolver may take. */
const LONGEST_MS = 60_000

/** @internal Answers a question of the native core: about a name, or for a login. */
export function answer(question: number, name: NameQuestion | undefined, credentials: LoginSource | undefined): void {
  const answered = name ? recordsOf(...name) : askForLogin(credentials!)
  answered.then(
    (value) => native.answer(question, JSON.stringify(value), ''),
    (thrown) => native.answer(question, undefined, reasonOf(thrown)),
  )
}

/** Returns host and port of each SRV record of a service, and the TXT records of the name. */
async function recordsOf(service: string, name: string, limitMs: number): Promise<[[string, number][], string[]]> {
  const servers = dns.getServers()
  // Each server is asked twice, the second time for twice as long; Node notices the end of a request up to its duration later. So the
  // lookup, which keeps the process alive, ends within the limit.
  const timeout = Math.min(Math.ceil(limitMs / (5 * Math.max(servers.length, 1))), LONGEST_MS)
  const resolver = new dns.promises.Resolver({ timeout, tries: 2 })
  if (`${servers}` !== `${resolver.getServers()}`) resolver.setServers(servers)
  try {
    const [hosts, texts] = await Promise.all([
      resolver.resolveSrv(`_${service}._tcp.${name}`).catch(none),
      resolver.resolveTxt(name).catch(none),
    ])
    return [hosts.map((host) => [host.name, host.port]), texts.map((parts) => parts.join(''))]
  } catch (thrown) {
    throw new Error(`the lookup in the DNS failed (${reasonOf(thrown)})`)
  } finally {
    // The other lookup, if one has failed.
    resolver.cancel()
  }
}

/** Returns no record where the DNS says that there is none. */
function none(error: NodeJS.ErrnoException): [] {
  if (error.code === 'ENODATA' || error.code === 'ENOTFOUND') return []
  throw error
}
