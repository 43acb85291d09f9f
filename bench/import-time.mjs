// Prints how long a new process takes to import a contender with its driver, in milliseconds.
import { describe } from './describe.mjs'

const [, , name] = process.argv
// Modules that every contender needs are loaded before.
await import('node:module')
await import('node:crypto')
const start = performance.now()
await describe(name)
console.log(performance.now() - start)
process.exit()
