// The hand-off on etcd.
import { handOff } from './suites/hand-off.mjs'

handOff('etcd', { confirmsLate: false })
