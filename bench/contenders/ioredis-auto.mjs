// The same as ioredis.mjs, on an ioredis that joins the commands of one tick.
import * as plain from './ioredis.mjs'

export const { kind, packages, does } = plain
export const setting = 'as ioredis, with `enableAutoPipelining: true`: more throughput, a slower single call'
export const connect = (...urls) => plain.connectWith({ enableAutoPipelining: true }, ...urls)
