// TLS and logins of Redis.
import { redis } from './drivers/redis.mjs'
import { security } from './suites/security.mjs'

security(redis)
