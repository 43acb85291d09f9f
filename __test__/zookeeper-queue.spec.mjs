// The queue on ZooKeeper.
import { queue } from './suites/queue.mjs'

queue('zookeeper')
