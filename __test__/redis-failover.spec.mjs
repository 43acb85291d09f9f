// A master of Redis whose replica is promoted.
import { redis } from './drivers/redis.mjs'
import { promotion } from './suites/promotion.mjs'

promotion(redis)
