// What a grant survives on MariaDB.
import { mysql } from './drivers/mysql.mjs'
import { durability } from './suites/durability.mjs'

durability(mysql)
