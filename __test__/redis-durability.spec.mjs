// What a grant survives on Redis with `minReplicas`.
import { redis } from './drivers/redis.mjs'
import { durability } from './suites/durability.mjs'

durability(redis)
