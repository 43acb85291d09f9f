// A failed try: one attempt for a name that another process holds, with the result "busy".
import { measureAll } from '../contender-processes.mjs'
import { mongodbs, onServer, redis } from './stores.mjs'

const LOADS = [1, 64]

export async function tries(timing) {
  const fields = []
  for (const { contenders, floor, ...store } of [redis, ...mongodbs]) {
    fields.push(
      await onServer(store, async ({ url, probe, version }) => {
        const results = await measureAll({ contenders, urls: [url], what: 'tryHeld', loads: LOADS, probe, ...timing })
        return { title: `Failed tries, ${version}`, one: 'try', floor, results }
      }),
    )
  }
  return { fields }
}
