// The contract of the API: the same tests for every store.
import { acquire } from './contract/acquire.mjs'
import { close } from './contract/close.mjs'
import { elect } from './contract/elect.mjs'
import { gist } from './contract/gist.mjs'
import { lock } from './contract/lock.mjs'
import { inspect } from './contract/inspect.mjs'
import { minHold } from './contract/min-hold.mjs'
import { multi } from './contract/multi.mjs'
import { oncePer } from './contract/once.mjs'
import { options } from './contract/options.mjs'
import { shared } from './contract/shared.mjs'
import { using } from './contract/using.mjs'
import { KINDS, suite } from './stores.mjs'

export function contract(kind) {
  for (const part of [gist, acquire, multi, lock, using, oncePer, minHold, options, inspect, elect, close])
    suite(kind, part.name, part)
  if (KINDS[kind].shares) suite(kind, shared.name, shared)
}
