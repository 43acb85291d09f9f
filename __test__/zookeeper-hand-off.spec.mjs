// The hand-off on ZooKeeper.
import { handOff } from './hand-off.mjs'

handOff('zookeeper', { confirmsLate: false, readsToken: true })
