// Bursts of calls on PostgreSQL.
import { bursts } from './suites/bursts.mjs'

bursts('postgres')
