import { IN_BACKGROUND } from './connection.js'
import { native } from './native.js'
import type { AcquireRecord, NativeService } from './native.js'
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

const DEFAULT_WAIT_MS = 10_000
/** The pause before the second attempt to connect, in milliseconds. Each later pause is twice as long. */
const FIRST_PAUSE_MS = 50
const LONGEST_PAUSE_MS = 1000
/** The upper limit of the measured time of one attempt to connect, in milliseconds. */
const LONGEST_ATTEMPT_MS = 2 ** 31

/** Whether a later attempt to connect may succeed. */
const isRetryable = (thrown: unknown) => typeof thrown === 'string' && JSON.parse(thrown).retryable === true

/**
 * @internal Returns a service that connects at its first call. A call rejects with the error of the attempt to connect; the next
 * call tries again. A call with `onStoreError: 'wait'` tries again itself for its `waitMs`.
 *
 * @param connect connects, until `native.cancel` with the ticket
 * @param defaults the defaults of the service for `acquire`
 */
export function lazily(
  connect: (ticket: number) => Promise<NativeService>,
  defaults: Readonly<AcquireRecord>,
): NativeService {
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
    let how: 'closed' | 'cancelled' | undefined
    let wake = () => {}
    // A new promise for each wait: one for the whole call would collect the reactions of all attempts.
    const ended = () => new Promise<void>((resolve) => (wake = resolve))
    const end = (reason: 'closed' | 'cancelled') => {
      how = reason
      wake()
    }
    const { ticket, limitMs, isInBackground } = waitOf(name, args)
    let leftMs = limitMs
    ends.add(end)
    if (ticket !== undefined) unstarted.set(ticket, () => end('cancelled'))
    try {
      for (let pauseMs = FIRST_PAUSE_MS; how === undefined; pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS)) {
        const attemptTicket = newTicket()
        const attempting = native.pause(LONGEST_ATTEMPT_MS, attemptTicket, isInBackground)
        try {
          const opened = await Promise.race([open(), ended()])
          if (opened) return (opened[name] as (...args: any[]) => unknown)(...args)
        } catch (thrown) {
          if (limitMs === 0 || !isRetryable(thrown)) throw thrown
          native.cancel(attemptTicket)
          leftMs -= await attempting
          if (leftMs <= 0) throw thrown
        } finally {
          native.cancel(attemptTicket)
        }
        if (how !== undefined) break
        const pauseTicket = newTicket()
        const paused = native.pause(Math.min(pauseMs, leftMs), pauseTicket, isInBackground)
        await Promise.race([paused, ended()])
        native.cancel(pauseTicket)
        leftMs -= await paused
        args[2] = Math.max(1, leftMs)
      }
      if (how === 'closed') throw CLOSED
      return 0
    } finally {
      ends.delete(end)
      if (ticket !== undefined) unstarted.delete(ticket)
    }
  }

  /** Returns, from the arguments of a call, how it waits for the connection. Only `acquire` can wait or be cancelled. */
  function waitOf(name: keyof NativeService, args: any[]) {
    const more: AcquireRecord = (name === 'acquire' && args[4]) || {}
    const { ticket, waitsForStore = defaults.waitsForStore } = more
    const waitMs: number = Number.isNaN(args[2]) ? (defaults.waitMs ?? DEFAULT_WAIT_MS) : args[2]
    const limitMs = name === 'acquire' && waitsForStore ? waitMs : 0
    return { ticket, limitMs, isInBackground: (args[3] & IN_BACKGROUND) !== 0 }
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
      if (name === 'closeUnused') return async () => (await connecting?.catch(() => {}))?.closeUnused() ?? false
      if (name === 'setEvents') return (observed: boolean) => (isObserved = observed)
      if (name === 'setRunsJobs') return (runs: boolean) => (runsJobs = runs)
      return (...args: any[]) => call(name, args)
    },
  })
}
