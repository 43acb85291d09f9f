import { native } from './native.js'
import type { NativeService } from './native.js'
import { newTicket, unstarted } from './signals.js'

/** Counters of a service that is not connected yet. */
const UNCONNECTED = { held: 0, waiting: 0, acquired: 0, busy: 0, released: 0, renewed: 0, lost: 0, storeErrors: 0 }
/** The rejection of a call to a closed service, as the native core makes it. */
const CLOSED = JSON.stringify({
  code: 'LOCK_CLOSED',
  message: 'this LockService is closed',
  retryable: false,
  cause: null,
})

/**
 * @internal Returns a service that connects at its first call. A call rejects with the error of the attempt to connect; the next
 * call tries again.
 *
 * @param connect connects, until `native.cancel` with the ticket
 */
export function lazily(connect: (ticket: number) => Promise<NativeService>): NativeService {
  let service: NativeService | undefined
  let connecting: Promise<NativeService> | undefined
  let isClosed = false
  let runsJobs = false
  let isObserved = false
  const connectTicket = newTicket()
  // They end the calls that wait for the connection.
  const ends = new Set<(end: 'closed' | 'cancelled') => void>()

  function open(): Promise<NativeService> {
    return (connecting ??= connect(connectTicket).then(
      (opened) => {
        if (runsJobs) opened.setRunsJobs(true)
        if (isObserved) opened.setEvents(true)
        return (service = opened)
      },
      (thrown) => {
        connecting = undefined
        throw thrown
      },
    ))
  }

  async function close(): Promise<void> {
    isClosed = true
    native.cancel(connectTicket)
    connecting?.then((opened) => opened.close(0)).catch(() => {})
    for (const end of ends) end('closed')
  }

  async function call(name: keyof NativeService, args: any[]): Promise<unknown> {
    if (isClosed) throw CLOSED
    const ticket: number | undefined = args[4]?.ticket
    let end!: (end: 'closed' | 'cancelled') => void
    const ended = new Promise<'closed' | 'cancelled'>((resolve) => (end = resolve))
    ends.add(end)
    if (ticket !== undefined) unstarted.set(ticket, () => end('cancelled'))
    try {
      const opened = await Promise.race([open(), ended])
      if (opened === 'closed') throw CLOSED
      return opened === 'cancelled' ? 0 : (opened[name] as (...args: any[]) => unknown)(...args)
    } finally {
      ends.delete(end)
      if (ticket !== undefined) unstarted.delete(ticket)
    }
  }

  return new Proxy(Object.create(native.LockService.prototype) as NativeService, {
    get(_, name: keyof NativeService) {
      if (service) {
        const member: unknown = service[name]
        return typeof member === 'function' ? member.bind(service) : member
      }
      if (name === 'stats') return () => JSON.stringify(UNCONNECTED)
      if (name === 'engine') return 'not connected'
      if (name === 'close') return close
      if (name === 'setEvents') return (observed: boolean) => (isObserved = observed)
      if (name === 'setRunsJobs') return (runs: boolean) => (runsJobs = runs)
      return (...args: any[]) => call(name, args)
    },
  })
}
