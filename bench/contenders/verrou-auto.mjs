// The same as verrou.mjs, on an ioredis that joins the commands of one tick.
import * as plain from './verrou.mjs'

export const { kind, packages, does } = plain
export const setting = 'as verrou, with `enableAutoPipelining: true`: more throughput, a slower single call'
export const connect = (...urls) => plain.connectWith({ enableAutoPipelining: true }, ...urls)
