// The hand-off on Redis.
import { handOff } from './suites/hand-off.mjs'

handOff('redis')
