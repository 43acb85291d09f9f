// Three members of etcd.
import { etcd } from './drivers/etcd.mjs'
import { failover } from './suites/failover.mjs'

failover(etcd)
