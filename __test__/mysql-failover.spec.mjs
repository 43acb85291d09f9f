// A primary of MariaDB whose replica is promoted.
import { mysql } from './drivers/mysql.mjs'
import { promotion } from './suites/promotion.mjs'

promotion(mysql)
