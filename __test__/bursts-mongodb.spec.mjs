// Bursts of calls on MongoDB.
import { bursts } from './bursts.mjs'

for (const kind of ['mongodb', 'mongodb-replica-set']) bursts(kind)
