// What the processes under test have in common: the task that the test gave them, and how they say what happened.
import { writeSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { LockService } from '../../index.js'

/** What the test wants of this process: `url`, `options` of the store, and whatever the script asks for. */
export const task = JSON.parse(process.argv[2])

/** One line to the test, written at once: it arrives even if the process is killed right after it. */
export const report = (message) => writeSync(1, `${JSON.stringify(message, plain)}\n`)

const plain = (_, value) => (typeof value === 'bigint' ? String(value) : value)

export const open = (options) => LockService.connect(task.url, { ...task.options, ...options })

/** The test's lines. They end, and with them the process, when the test goes away, however it does. */
export const requests = () => createInterface({ input: process.stdin })

/** Keeps the JavaScript thread from doing anything else. */
export function block(ms) {
  for (const end = performance.now() + ms; performance.now() < end; );
}
