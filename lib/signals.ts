import { AsyncResource } from 'node:async_hooks'
import { errorOf } from './errors.js'
import { native } from './native.js'
import type { Signal, SignalLike } from './types.js'

/** @internal A call that its caller's signal cancels. */
export interface Cancellation {
  readonly ticket: number
  aborted: boolean
}

interface Group {
  readonly calls: Set<Cancellation>
  readonly listener: () => void
}

// One listener per signal, for any number of waiting calls: with more than ten listeners Node warns of a leak.
const groups = new WeakMap<SignalLike, Group>()
let lastTicket = 0

/** @internal Returns a new number for `native.cancel`. */
export const newTicket = (): number => ++lastTicket

/** @internal What cancels a call that waits for its service to connect, by ticket. */
export const unstarted = new Map<number, () => void>()

function removeListener(signal: SignalLike, { listener }: Group): void {
  groups.delete(signal)
  try {
    signal.removeEventListener('abort', listener)
  } catch {
    // The listener stays. It has no effect.
  }
}

/** @internal Adds a call to the listener of its caller's signal. Throws the reason of an aborted signal. */
export function listen(signal: SignalLike): Cancellation {
  if (signal.aborted) throw signal.reason
  const call = { ticket: newTicket(), aborted: false }
  const known = groups.get(signal)
  if (known) {
    known.calls.add(call)
    return call
  }
  const listener = () => {
    if (groups.get(signal) !== group) return
    removeListener(signal, group)
    for (const waiting of group.calls) {
      waiting.aborted = true
      native.cancel(waiting.ticket)
      unstarted.get(waiting.ticket)?.()
    }
  }
  const group: Group = { calls: new Set([call]), listener }
  groups.set(signal, group)
  try {
    signal.addEventListener('abort', listener)
  } catch (thrown) {
    groups.delete(signal)
    throw thrown
  }
  // A signal may call the listener at once.
  if (call.aborted) throw signal.reason
  return call
}

/** @internal Removes a call. Removes the listener with the last call of the signal. */
export function unlisten(signal: SignalLike, call: Cancellation): void {
  const group = groups.get(signal)
  if (group?.calls.delete(call) && group.calls.size === 0) removeListener(signal, group)
}

// The locks whose signal was read, by the number of the lease. The map keeps such a lock alive until the lease has ended.
const watched = new Map<number, LossSignal>()
const LIVE = ['aborted', 'reason', 'throwIfAborted'] as const

/** @internal Aborts the signal of a lock whose loss the native core reported. */
export function reportLoss(id: number, error: Record<string, any>): void {
  watched.get(id)?.lose(error)
}

/**
 * @internal Aborts the signal of a lock when the lease is lost.
 *
 * After the process was suspended, the user's code may run before the event loop delivers the loss. So until then `aborted`,
 * `reason` and `throwIfAborted` are properties of the signal itself: they read the native clock, and abort the signal if the
 * lease is lost. They are removed when the lease ends: the signal is then an ordinary one.
 */
export class LossSignal {
  readonly signal: Signal
  readonly #id: number
  readonly #prefix: string
  readonly #controller = new AbortController()
  /** The asynchronous context in which the signal was first read: its listeners run there. */
  readonly #context = new AsyncResource('HOLDFAST')

  /**
   * @param owner the `Lock`, which stays alive as long as the signal may abort
   * @param prefix the prefix of a view, which errors omit
   */
  constructor(
    id: number,
    readonly owner: object,
    prefix: string,
  ) {
    this.#id = id
    this.#prefix = prefix
    const { signal } = this.#controller
    this.signal = signal
    if (native.watch(id)) {
      watched.set(id, this)
      for (const name of LIVE) Object.defineProperty(signal, name, { configurable: true, ...this.#live(name) })
    }
    this.#check()
  }

  /** Returns the property that reads the native clock. */
  #live(name: (typeof LIVE)[number]): PropertyDescriptor {
    const { signal } = this.#controller
    if (name === 'throwIfAborted') return { value: () => this.#check() && signal.throwIfAborted() }
    return { get: () => (this.#check() ? signal[name] : name === 'aborted' ? false : undefined) }
  }

  /** Aborts the signal if the lease is lost by the native clock. */
  #check(): boolean {
    const loss = native.loss(this.#id)
    if (loss == null) return false
    this.lose(loss)
    return true
  }

  /** Aborts the signal with the error that the native core describes. */
  lose(error: string | Record<string, any>): void {
    this.abort(errorOf(error, this.#prefix))
  }

  /** Aborts the signal. */
  abort(reason: unknown): void {
    this.settle()
    this.#context.runInAsyncScope(() => this.#controller.abort(reason))
  }

  /** Makes the signal an ordinary one: the lease has ended. */
  settle(): void {
    if (!watched.delete(this.#id)) return
    for (const name of LIVE) Reflect.deleteProperty(this.#controller.signal, name)
  }

  /** Handles the release of the lock. A loss before the release still aborts the signal. */
  released(): void {
    if (native.loss(this.#id) == null) this.settle()
  }
}
