// Faults of etcd: full, lost and silent servers, and names with thousands of entries.
import { etcd } from './drivers/etcd.mjs'
import { faults } from './suites/faults.mjs'

faults(etcd)
