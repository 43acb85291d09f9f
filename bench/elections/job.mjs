// The command of `holdfast run` and of `etcdctl lock`: works until SIGUSR2 ends it normally, or does the job of a tick.
import { jobOf, stepLog, work } from './step-log.mjs'

const [, , id, file, tick] = process.argv
const log = stepLog(file, id)
let isEnded = false
process.on('SIGUSR2', () => (isEnded = true))
// The runner kills it earlier, unless the runner itself was killed.
setTimeout(() => process.exit(1), 120_000).unref()
await (tick ? jobOf(log, tick) : work(log, () => isEnded))
