// A pair is one acquire and one release of a free name.
import { measureAll } from '../contender-processes.mjs'
import { CALLS, mongodbs, onServer, redis, REDIS } from './stores.mjs'

const PARTS = [
  { ...redis, contenders: [...REDIS, ...CALLS], loads: [1, 16, 64, 256, 1024] },
  ...mongodbs.map((mongodb) => ({ ...mongodb, loads: [1, 64, 256] })),
]

export async function pairs(timing) {
  const fields = []
  for (const { contenders, floor, loads, ...store } of PARTS) {
    fields.push(
      await onServer(store, async ({ url, probe, version }) => {
        const results = await measureAll({ contenders, urls: [url], what: 'pair', loads, probe, ...timing })
        return { title: `Pairs, ${version}`, one: 'pair', floor, results }
      }),
    )
  }
  return { fields }
}
