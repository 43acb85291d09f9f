// The hand-off on etcd.
import { handOff } from './hand-off.mjs'

handOff('etcd', { confirmsLate: false })
