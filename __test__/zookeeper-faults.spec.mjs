// Faults of ZooKeeper: full, lost and silent servers, and names with thousands of entries.
import { zookeeper } from './drivers/zookeeper.mjs'
import { faults } from './suites/faults.mjs'

faults(zookeeper)
