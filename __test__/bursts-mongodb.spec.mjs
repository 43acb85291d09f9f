// Bursts of calls on MongoDB.
import { bursts } from './suites/bursts.mjs'

for (const kind of ['mongodb', 'mongodb-replica-set']) bursts(kind)
