// The queue on ZooKeeper.
import { queue } from './queue.mjs'

queue('zookeeper')
