// Bursts of calls on PostgreSQL.
import { bursts } from './bursts.mjs'

bursts('postgres')
