// Prints how long a new process takes to import a contender with its driver, in milliseconds.
const [, , module] = process.argv
// Modules that every contender needs are loaded before.
await import('node:module')
await import('node:crypto')
const start = performance.now()
await import(`./contenders/${module}.mjs`)
console.log(performance.now() - start)
process.exit()
