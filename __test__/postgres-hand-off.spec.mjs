// The hand-off on PostgreSQL.
import { handOff } from './hand-off.mjs'

handOff('postgres')
