// The queue in MariaDB or MySQL.
import { queue } from './queue.mjs'

queue('mysql')
