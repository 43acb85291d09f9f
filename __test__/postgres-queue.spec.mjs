// The queue in PostgreSQL.
import { queue } from './suites/queue.mjs'

queue('postgres')
