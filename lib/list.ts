import type { Connection } from './connection.js'
import { fromNative, invalid } from './errors.js'
import { infosOf } from './json.js'
import { fields, text } from './options.js'
import type { LockInfo } from './types.js'

/** Reads the list, and converts a page at a time: the event loop runs between two pages. */
async function* pages({ native, prefix }: Connection, options: unknown): AsyncGenerator<LockInfo[], void, undefined> {
  const of = fields('options', options, ['prefix'])?.['prefix']
  const literal = of === undefined ? '' : text('prefix', of)
  try {
    const found = await native.list(prefix + literal)
    for (let page = await found.next(); page !== null; page = await found.next()) yield infosOf(page, prefix)
  } catch (thrown) {
    throw fromNative(thrown, prefix)
  }
}

/** @internal `list`: a promise of the whole list, and an iterable, which converts a page when it is needed. */
export function list(connection: Connection, options: unknown): Promise<LockInfo[]> & AsyncIterable<LockInfo> {
  let how: 'awaited' | 'iterated' | undefined
  async function collect(): Promise<LockInfo[]> {
    // An iteration begins in the tick of the call.
    await undefined
    if (how === 'iterated') throw invalid('the result of list', 'must be awaited or iterated', 'both')
    how = 'awaited'
    const infos: LockInfo[] = []
    for await (const page of pages(connection, options)) infos.push(...page)
    return infos
  }
  const collected = collect()
  async function* fromPages(): AsyncGenerator<LockInfo, void, undefined> {
    for await (const page of pages(connection, options)) yield* page
  }
  async function* fromCollected(): AsyncGenerator<LockInfo, void, undefined> {
    yield* await collected
  }
  // Not an async generator: the body of a generator runs only at the first `next()`, and `how` must be set now.
  const iterate = (): AsyncGenerator<LockInfo, void, undefined> => {
    collected.catch(() => {})
    if (how === 'awaited') return fromCollected()
    how = 'iterated'
    return fromPages()
  }
  return Object.assign(collected, { [Symbol.asyncIterator]: iterate })
}
