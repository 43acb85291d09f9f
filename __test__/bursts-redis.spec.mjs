// Bursts of calls on Redis.
import { bursts } from './suites/bursts.mjs'

for (const kind of ['redis', 'redis-cluster', 'redis-sentinel', 'redis-quorum']) bursts(kind)
