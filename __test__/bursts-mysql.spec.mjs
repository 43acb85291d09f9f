// Bursts of calls on MariaDB or MySQL.
import { bursts } from './bursts.mjs'

bursts('mysql')
