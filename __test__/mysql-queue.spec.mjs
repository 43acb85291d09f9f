// The queue in MariaDB or MySQL.
import { queue } from './suites/queue.mjs'

queue('mysql')
