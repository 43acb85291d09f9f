// The hand-off on a MongoDB replica set.
import { handOff } from './suites/hand-off.mjs'

handOff('mongodb-replica-set')
