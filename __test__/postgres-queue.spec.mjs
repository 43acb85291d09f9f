// The queue in PostgreSQL.
import { queue } from './queue.mjs'

queue('postgres')
