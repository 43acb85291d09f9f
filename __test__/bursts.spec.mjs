// Bursts of calls on the embedded stores.
import { bursts } from './bursts.mjs'

for (const kind of ['memory', 'sqlite']) bursts(kind)
