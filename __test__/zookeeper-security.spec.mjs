// TLS and logins of ZooKeeper.
import { zookeeper } from './drivers/zookeeper.mjs'
import { security } from './suites/security.mjs'

security(zookeeper)
