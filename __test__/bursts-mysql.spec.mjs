// Bursts of calls on MariaDB or MySQL.
import { bursts } from './suites/bursts.mjs'

bursts('mysql')
