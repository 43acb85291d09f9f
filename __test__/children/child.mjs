// Common code of the processes under test: the task from the test, and messages to the test.
import { writeSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { LockService } from '../../index.js'

export { block } from '../tools.mjs'

/** The task: `url` and `options` of the store, and what the script needs. */
export const task = JSON.parse(process.argv[2])

/** Sends a message to the test. The write is synchronous: the message arrives even if the process is killed right after it. */
export const report = (message) => writeSync(1, `${JSON.stringify(message, bigintToText)}\n`)

const bigintToText = (_, value) => (typeof value === 'bigint' ? String(value) : value)

/** Connects. A busy machine may need several attempts. */
export const open = (options) => LockService.connect(task.url, { connectMs: 20_000, ...task.options, ...options })

/** Returns the test's requests, one per line. The input ends when the test ends, and with it the process. */
export const requests = () => createInterface({ input: process.stdin })
