// TLS and logins of etcd.
import { etcd } from './drivers/etcd.mjs'
import { security } from './suites/security.mjs'

security(etcd)
