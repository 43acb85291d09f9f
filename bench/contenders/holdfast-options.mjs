// holdfast, called in another way.
import * as plain from './holdfast.mjs'

export const { kind, packages, does } = plain
export const setting = '`acquire(name, { ttlMs, waitMs })` and `release()`'
export const connect = (...urls) => plain.connectWith('options', ...urls)
