// `holdfast ls`, `inspect`, `watch` and `release`.
import { interrupted, intervalOf, oneOf, prefixOf, sharedOf, UsageError, withLocks } from './common.mjs'
import { complain, printable, processOf, summaryOf, table } from './text.mjs'

/** @typedef {import('./common.mjs').Run} Run */

/** @type {Run} */
export async function list(positionals, values) {
  const prefix = prefixOf(positionals)
  const found = await withLocks(values, (locks) => locks.list({ prefix }))
  if (values.json) for (const info of found) console.log(JSON.stringify(info))
  else if (found.length > 0) console.log(table(found).join('\n'))
  return 0
}

/** @type {Run} */
export async function inspect(names, values) {
  const name = oneOf(names)
  if (values.shared) return inspectShared(name, values)
  const info = await withLocks(values, (locks) => locks.inspect(name))
  if (values.json) console.log(JSON.stringify(info))
  else console.log(info ? table([info]).join('\n') : `${printable(name)} is free`)
  return info ? 0 : 1
}

/**
 * Shows the holders of a semaphore or a read/write lock.
 *
 * @param {string} name
 * @param {import('./common.mjs').Values} values
 */
async function inspectShared(name, values) {
  const info = await withLocks(values, (locks) => sharedOf(locks, name).inspect())
  if (values.json) console.log(JSON.stringify(info))
  else console.log([summaryOf(info), ...(info.used > 0 ? table(info) : [])].join('\n'))
  return info.used > 0 ? 0 : 1
}

/** @type {Run} */
export async function watch(names, values) {
  const name = oneOf(names)
  const intervalMs = intervalOf(values)
  const signal = interrupted()
  const body = async (/** @type {import('../../index.js').LockService} */ locks) => {
    // Rejects if there is no store. The iteration waits for it.
    await locks.inspect(name)
    for await (const info of locks.watch(name, { intervalMs, signal })) {
      const at = new Date().toISOString()
      const state = info ? `held by process ${processOf(info)}, fencing token ${info.fencingToken ?? '-'}` : 'free'
      console.log(values.json ? JSON.stringify(info) : `${at}  ${printable(name)} is ${state}`)
    }
  }
  await withLocks(values, body, signal)
  return 0
}

/** @type {Run} */
export async function release(names, values) {
  const name = oneOf(names)
  if (!values.force) throw new UsageError('--force is missing: the holder would lose the lock while it works')
  const released = await withLocks(values, (locks) =>
    values.shared ? sharedOf(locks, name).forceRelease() : locks.forceRelease(name),
  )
  complain(`${name} ${released ? 'was released' : 'was free'}`)
  return released ? 0 : 1
}
