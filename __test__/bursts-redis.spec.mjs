// Bursts of calls on Redis.
import { bursts } from './bursts.mjs'

for (const kind of ['redis', 'redis-cluster', 'redis-sentinel', 'redis-quorum']) bursts(kind)
