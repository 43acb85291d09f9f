// The queue in etcd.
import { queue } from './suites/queue.mjs'

queue('etcd')
