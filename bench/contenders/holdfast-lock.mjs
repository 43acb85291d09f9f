// holdfast, called in another way.
import * as plain from './holdfast.mjs'

export const { kind, packages, does } = plain
export const setting = '`acquireLock` and `releaseLock`, default options'
export const connect = (...urls) => plain.connectWith('lock', ...urls)
