import type { Election } from './election.js'
import { fromNative, invalid, warn } from './errors.js'
import { createLock, registerLock } from './lock.js'
import type { Lock } from './lock.js'
import type { NativeService } from './native.js'
import type { Request } from './options.js'
import { listen, unlisten } from './signals.js'
import type { Source } from './telemetry.js'
import type { LockStats } from './types.js'
import type { Watch } from './watch.js'

// The flags of the native `acquire` (`src/js/service.rs`).
const [RENEW, NO_RENEW] = [1, 2]
/** @internal The flag of a call that rejects with `LOCK_TIMEOUT` when a name is busy. Without it the call resolves to `null`. */
export const REJECT_BUSY = 4
/** @internal The flag of a call that does not keep the process alive. */
export const IN_BACKGROUND = 8

/** @internal What a service and its views (`withPrefix`) share, and the prefix of the view. */
export interface Connection {
  readonly native: NativeService
  /** Precedes every name of the view; empty for the service itself. */
  readonly prefix: string
  /** The jobs of `using` and the like that run now. */
  readonly jobs: { running: number }
  /** Whether this outage has had its warning. A grant resets it. */
  readonly outage: { isWarned: boolean }
  /** The elections that have not ended. */
  readonly elections: Set<Election>
  /** The names that `watch` reads, with their prefix. */
  readonly watches: Map<string, Watch>
  /** The default of `renew`. */
  readonly renews: boolean
  /** The URLs of the store without secrets. */
  readonly connectedTo: string
  readonly source: Source
}

/** @internal What telemetry reads of a service. */
export interface Observed {
  readonly source: Source
  isConnected(): boolean
  stats(): LockStats
  /** Removes the receiver. */
  end(): void
}

/** @internal Adds a receiver of the events of a service, for `otel.ts`. */
export function observe({ native, source }: Connection): Observed {
  source.receivers += 1
  native.setEvents(true)
  return {
    source,
    isConnected: () => native.isConnected(),
    stats: () => JSON.parse(native.stats()),
    end() {
      source.receivers -= 1
      if (source.receivers === 0) native.setEvents(false)
    },
  }
}

let isWarned = false
// The registered object is `jobs`, which a service, its views, its elections and its watches share.
const dropped = new FinalizationRegistry<Pick<Connection, 'native' | 'source' | 'connectedTo'>>(
  async ({ native, source, connectedTo }) => {
    if (!(await native.closeUnused())) return
    source.isClosed = true
    if (isWarned || source.engine === 'memory') return
    isWarned = true
    warn(
      'HOLDFAST_NOT_CLOSED',
      `a LockService (${connectedTo}) was garbage collected without close(): it had no locks, and its connections are closed now. ` +
        'Call close(), or use `await using`, when a service is not needed any more. Later services are not warned about.',
    )
  },
)

/** @internal Closes the connections when everything that uses them is garbage collected. */
export function register(connection: Connection): Connection {
  const { native, source, connectedTo, jobs } = connection
  dropped.register(jobs, { native, source, connectedTo }, jobs)
  return connection
}

/** @internal Reverts `register`: a call closes the connections. */
export function unregister({ jobs }: Connection): void {
  dropped.unregister(jobs)
}

/** @internal Returns the URLs of a store without user, password and parameters, for `console.log`. */
export function shownUrls(urls: readonly string[]): string {
  return urls.length === 0 ? 'sqlite: (the embedded store)' : urls.map(shownUrl).join(', ')
}

function shownUrl(url: string): string {
  const [, scheme, rest] = /^([^:/?#]+:\/\/)(.*)$/s.exec(url) ?? ['', '', url]
  const server = rest!.replace(/[?#].*/s, '')
  // A password that is not percent-encoded may contain any of these characters.
  const isUnclear = !server.includes('@') || (scheme === '' && !/^(sqlite|memory):/.test(url))
  if (isUnclear && rest!.includes('@')) return `${scheme}…`
  return scheme + server.slice(scheme === '' ? 0 : server.lastIndexOf('@') + 1)
}

/** @internal Returns a name with the prefix of the view. */
export function fullName({ prefix }: Connection, name: string): string {
  if (prefix === '') return name
  // The native core checks the name with its prefix.
  if (name === '') throw invalid('name', 'must not be empty', '""')
  return prefix + name
}

/** @internal Makes the native call of all acquisitions but `acquireLock`. Resolves to `null` if a name is busy. */
export async function acquire(
  connection: Connection,
  names: string | string[],
  request: Request,
  flags: number,
): Promise<Lock | null> {
  const { ttlMs, waitMs, renew, signal } = request
  const { prefix } = connection
  let full = names
  if (prefix !== '')
    full = typeof names === 'string' ? fullName(connection, names) : names.map((name) => fullName(connection, name))
  let { more } = request
  const call = signal && listen(signal)
  if (call) more = { ...more, ticket: call.ticket }
  if (renew !== undefined) flags |= renew ? RENEW : NO_RENEW
  let id: number
  try {
    id = await connection.native.acquire(full, ttlMs, waitMs, flags, more)
  } catch (thrown) {
    throw call?.aborted ? signal!.reason : fromNative(thrown, prefix)
  } finally {
    if (call) unlisten(signal!, call)
  }
  if (id !== 0) connection.outage.isWarned = false
  const share = more?.share
  if (!call?.aborted) return id === 0 ? null : createLock(id, names, prefix, share)
  // The grant arrived after the abort.
  if (id !== 0) await registerLock(createLock(id, names, prefix, share))[Symbol.asyncDispose]()
  throw signal!.reason
}
