import { AsyncResource } from 'node:async_hooks'
import type { ConnectRequest } from './connect.js'
import { stackOf, warn } from './errors.js'
import { withTokenAsText } from './json.js'
import { answer } from './questions.js'
import type { NameQuestion } from './questions.js'
import { reportLoss } from './signals.js'
import { publish } from './telemetry.js'
import type { Source } from './telemetry.js'
import type { LockEvent } from './types.js'

/** A message of the native core: an event, the loss of a lease, a question, or a warning of the store. */
interface Message {
  lost?: number
  question?: number
  records?: NameQuestion
  warning?: string
  error?: Record<string, any>
  type: string
  names: string[] | null
  [part: string]: unknown
}

/**
 * @internal Creates the function that receives the messages of one service. It has no reference to the service. It calls the user's
 * functions in the asynchronous context of `connect`, not in that of the call that made the native core start.
 */
export function receiver({ onEvent, credentials }: ConnectRequest, source: Source): (batch: string) => void {
  const context = new AsyncResource('HOLDFAST')
  return (batch) =>
    context.runInAsyncScope(() => {
      for (const message of JSON.parse(batch) as Message[]) {
        if (message.lost !== undefined) reportLoss(message.lost, message.error!)
        else if (message.question !== undefined) answer(message.question, message.records, credentials)
        else if (message.warning !== undefined) warn('HOLDFAST_STORE', message.warning)
        else deliver(onEvent, message, source)
      }
    })
}

/** Publishes an event, and calls `onEvent`. What that throws or rejects with becomes a warning. */
function deliver(
  onEvent: ((event: LockEvent) => unknown) | undefined,
  { type, names, fencingToken, ...parts }: Message,
  source: Source,
): void {
  const event: Record<string, unknown> & { fencingToken?: bigint } = { type, engine: source.engine }
  if (names) Object.assign(event, { name: names[0], names })
  if (typeof fencingToken === 'string') event.fencingToken = BigInt(fencingToken)
  for (const [part, value] of Object.entries(parts)) if (value !== null) event[part] = value
  const lockEvent = withTokenAsText(event) as unknown as LockEvent
  publish(lockEvent, source)
  if (!onEvent) return
  try {
    const returned: any = onEvent(lockEvent)
    if (typeof returned === 'object' && typeof returned?.then === 'function') Promise.resolve(returned).catch(warnOf)
  } catch (thrown) {
    warnOf(thrown)
  }
}

function warnOf(thrown: unknown): void {
  warn('HOLDFAST_EVENT', `onEvent failed: ${stackOf(thrown)}`)
}
