// Three servers of ZooKeeper.
import { zookeeper } from './drivers/zookeeper.mjs'
import { failover } from './suites/failover.mjs'

failover(zookeeper)
