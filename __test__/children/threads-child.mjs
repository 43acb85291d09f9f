// The same as child.mjs, for a main thread that must not load the addon.
import { writeSync } from 'node:fs'

export const task = JSON.parse(process.argv[2])
export const report = (message) => writeSync(1, `${JSON.stringify(message)}\n`)
