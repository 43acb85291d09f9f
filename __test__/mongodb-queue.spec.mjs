// The queue in MongoDB.
import { queue } from './queue.mjs'

queue('mongodb-replica-set')
