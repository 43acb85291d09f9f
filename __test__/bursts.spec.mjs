// Bursts of calls on the embedded stores.
import { bursts } from './suites/bursts.mjs'

for (const kind of ['memory', 'sqlite']) bursts(kind)
