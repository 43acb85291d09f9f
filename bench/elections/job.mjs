// The command of `holdfast run` and of `etcdctl lock`. SIGUSR2 ends it normally.
import { stepLog, work } from './step-log.mjs'

const [, , id, file] = process.argv
let isEnded = false
process.on('SIGUSR2', () => (isEnded = true))
// The runner kills it earlier, unless the runner itself was killed.
setTimeout(() => process.exit(1), 120_000).unref()
await work(stepLog(file, id), () => isEnded)
