// A job once per tick, in three instances whose clocks differ.
import { randomBytes } from 'node:crypto'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { readEvents } from './step-log.mjs'
import { startProcess } from './trial.mjs'

const INSTANCE = fileURLToPath(new URL('instance.mjs', import.meta.url))
const CLI = fileURLToPath(new URL('../../bin/holdfast.mjs', import.meta.url))
/** By how much the clocks of the instances are ahead, in milliseconds. */
export const SKEWS = [400, 0, -300]
/** Shorter than the interval by more than the clocks differ. */
const PERIOD_MS = 2200
export const INTERVAL_MS = 4000
/**
 * By name. `way` is that of instance.mjs, with its `argument`.
 *
 * @type {Record<string, { store: string, way: string, argument?: any, settings: string }>}
 */
export const TICKERS = {
  'holdfast oncePer': {
    store: 'redis',
    way: 'oncePer',
    argument: PERIOD_MS,
    settings: `\`oncePer(name, { periodMs: ${PERIOD_MS} }, job)\``,
  },
  'holdfast run --once-per': {
    store: 'redis',
    way: 'command',
    argument: ({ url, name }, job) => [
      process.execPath,
      CLI,
      'run',
      '--url',
      url,
      '--once-per',
      `${PERIOD_MS}ms`,
      '--busy-code',
      '0',
      name,
      '--',
      ...job,
    ],
    settings: `\`holdfast run --once-per ${PERIOD_MS}ms\`, started at each tick`,
  },
  'holdfast tryUsing': { store: 'redis', way: 'tryUsing', settings: '`tryUsing(name, job)`: the lock alone' },
  'nestjs-redlock-universal @Redlock': {
    store: 'redis',
    way: 'decorator',
    settings: '`@Redlock({ key })` with its default retries',
  },
  'nestjs-redlock-universal @Redlock, no retries': {
    store: 'redis',
    way: 'decorator',
    argument: { retryAttempts: 0 },
    settings: '`@Redlock({ key, retryAttempts: 0 })`',
  },
  'etcdctl lock': {
    store: 'etcd',
    way: 'command',
    argument: ({ url, name }, job) => ['etcdctl', '--endpoints', url, 'lock', name, ...job],
    settings: '`etcdctl lock NAME`, started at each tick: it waits for a busy name, and has no other way',
  },
}

/** Runs the instances. Resolves to how often each tick's job ran. */
export async function runsPerTick(ticker, { url, ticks, folder }) {
  const name = `ticks-${randomBytes(6).toString('hex')}`
  const file = join(folder, name)
  const instances = SKEWS.map((skewMs, i) => {
    const task = { id: `instance-${i}`, url, name, file, skewMs, intervalMs: INTERVAL_MS, ticks }
    return startProcess([process.execPath, INSTANCE, ticker, JSON.stringify(task)])
  })
  const failure = Promise.race(instances.map(({ ended }) => ended)).then(() => {
    throw new Error(`${ticker}: an instance ended\n${instances.map(({ errors }) => errors).join('')}`)
  })
  const ready = Promise.all(instances.map(({ child }) => new Promise((resolve) => child.once('message', resolve))))
  await Promise.race([ready, failure])
  failure.catch(() => {})
  const firstAt = Date.now() + 1000
  for (const { child } of instances) child.send(firstAt)
  await Promise.all(instances.map(({ ended }) => ended))
  const runs = readEvents(file)
  return Array.from({ length: ticks }, (_, tick) => runs.filter(({ what }) => what === `run-${tick}`).length)
}
