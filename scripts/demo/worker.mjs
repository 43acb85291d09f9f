// One of the demo's four processes. Runs a round on each message of its parent, which is also the database.
import { LockService } from '../../index.js'
import { noLocks, report } from './job.mjs'

/** @param {object} message */
const send = (message) => new Promise((resolve) => process.send?.(message, resolve))
/** @type {Map<number, (value: any) => void>} */
const pending = new Map()
let lastId = 0

/** @param {string} verb */
const request =
  (verb) =>
  (/** @type {unknown[]} */ ...args) =>
    new Promise((resolve) => {
      pending.set(++lastId, resolve)
      process.send?.({ type: 'ask', id: lastId, verb, args })
    })

const verbs = ['enter', 'find', 'start', 'progress', 'store', 'leave']
const database = /** @type {import('./job.mjs').Reports} */ (
  /** @type {unknown} */ (Object.fromEntries(verbs.map((verb) => [verb, request(verb)])))
)

try {
  // Connects to the store in HOLDFAST_URL.
  const service = await LockService.connect()
  const locks = process.env.HOLDFAST_DEMO_SABOTAGE === '1' ? noLocks : service

  process.on('message', async (/** @type {any} */ message) => {
    if (message.type === 'answer') return pending.get(message.id)?.(message.value)
    try {
      await send({ type: 'outcome', outcome: await report(locks, database, message.name) })
    } catch (thrown) {
      const { code, message } = /** @type {Error & { code?: string }} */ (thrown)
      await send({ type: 'outcome', outcome: 'failed', code, message })
    }
  })
  process.once('disconnect', () => service.close())
  await send({ type: 'ready' })
} catch (thrown) {
  await send({ type: 'unfit', message: thrown instanceof Error ? thrown.message : String(thrown) })
  process.disconnect()
}
