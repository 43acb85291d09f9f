// One of the demo's four processes. Runs a round on each message of its parent, which is also the database.
import { LockService } from '../../index.js'
import { noLocks, report } from './job.mjs'

const send = (message) => new Promise((resolve) => process.send(message, resolve))
const pending = new Map()
let lastId = 0

const request =
  (verb) =>
  (...args) =>
    new Promise((resolve) => {
      pending.set(++lastId, resolve)
      process.send({ type: 'ask', id: lastId, verb, args })
    })

const verbs = ['enter', 'find', 'start', 'progress', 'store', 'leave']
const database = Object.fromEntries(verbs.map((verb) => [verb, request(verb)]))

try {
  // Connects to the store in HOLDFAST_URL.
  const service = await LockService.connect()
  const locks = process.env.HOLDFAST_DEMO_SABOTAGE === '1' ? noLocks : service

  process.on('message', async (/** @type {any} */ message) => {
    if (message.type === 'answer') return pending.get(message.id)(message.value)
    try {
      await send({ type: 'outcome', outcome: await report(locks, database, message.name) })
    } catch (error) {
      await send({ type: 'outcome', outcome: 'failed', code: error.code, message: error.message })
    }
  })
  process.once('disconnect', () => service.close())
  await send({ type: 'ready' })
} catch (error) {
  await send({ type: 'unfit', message: error.message })
  process.disconnect()
}
