// holdfast, called in another way.
import * as plain from './holdfast.mjs'

export const { kind, packages, does } = plain
export const setting = '`acquire` and `release()`, a new name for each pair'
export const connect = (...urls) => plain.connectWith('new', ...urls)
