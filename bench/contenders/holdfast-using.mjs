// holdfast, called in another way.
import * as plain from './holdfast.mjs'

export const { kind, packages, does } = plain
export const setting = '`using(name, async () => {})`, default options'
export const connect = (...urls) => plain.connectWith('using', ...urls)
