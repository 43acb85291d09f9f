// The queue in MongoDB.
import { queue } from './suites/queue.mjs'

queue('mongodb-replica-set')
