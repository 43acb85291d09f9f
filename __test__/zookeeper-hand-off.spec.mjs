// The hand-off on ZooKeeper.
import { handOff } from './suites/hand-off.mjs'

handOff('zookeeper', { confirmsLate: false, readsToken: true })
