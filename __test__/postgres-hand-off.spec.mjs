// The hand-off on PostgreSQL.
import { handOff } from './suites/hand-off.mjs'

handOff('postgres')
