// The hand-off on Redis.
import { handOff } from './hand-off.mjs'

handOff('redis')
