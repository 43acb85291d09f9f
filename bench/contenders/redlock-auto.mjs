// The same as redlock.mjs, on an ioredis that joins the commands of one tick.
import * as plain from './redlock.mjs'

export const { kind, packages, does } = plain
export const setting = 'as redlock, with `enableAutoPipelining: true`: more throughput, a slower single call'
export const connect = (...urls) => plain.connectWith({ enableAutoPipelining: true }, ...urls)
