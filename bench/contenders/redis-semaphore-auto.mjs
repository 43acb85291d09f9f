// The same as redis-semaphore.mjs, on an ioredis that joins the commands of one tick.
import * as plain from './redis-semaphore.mjs'

export const { kind, packages, does } = plain
export const setting = 'as redis-semaphore, with `enableAutoPipelining: true`: more throughput, a slower single call'
export const connect = (...urls) => plain.connectWith({ enableAutoPipelining: true }, ...urls)
