// How long a fresh process takes to import a contender with its driver, in ms; and the same for nothing at all.
const [, , module] = process.argv
// What any module loads for itself is no part of it.
await import('node:module')
await import('node:crypto')
const start = performance.now()
await import(`./contenders/${module}.mjs`)
console.log(performance.now() - start)
process.exit()
