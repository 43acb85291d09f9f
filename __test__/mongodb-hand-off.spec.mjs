// The hand-off on a MongoDB replica set.
import { handOff } from './hand-off.mjs'

handOff('mongodb-replica-set')
