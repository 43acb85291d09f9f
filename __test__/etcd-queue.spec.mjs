// The queue in etcd.
import { queue } from './queue.mjs'

queue('etcd')
